"""A sweep as a user has it: several runs at once, a failure, a signal in the middle, and the same command again."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from experiments.config.compose import compose_runs
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, saved_step, state_of
from experiments.sweep import main
from experiments.sweeps.study import jobs_of
from tests.dist.commands import ROOT, run
from tests.dist.rank_functions import called
from tests.finished_runs import write_study
from tests.waiting import LIMIT_S, is_alive, wait_until

pytestmark = pytest.mark.dist
WORDS = [
    *("model=mlp", "dataset=synthetic", "dataset.settings={num_samples: 512, image_size: 8, num_classes: 4}"),
    *("batch_size=16", "cluster=simulated", "cluster.world_size=2"),
]


def study(folder: Path, *runs: str) -> list[str]:
    """Write a study of these runs; return the words that run it two at a time."""
    path = write_study(folder, WORDS, {"run": [run.split() for run in runs]})
    return [path, f"output={folder / 'runs'}", "--jobs", "2"]


def folders(output: Path) -> dict[State, list[RunFolder]]:
    found: dict[State, list[RunFolder]] = {}
    for path in sorted(output.glob("*/config.yaml")):
        folder = RunFolder(path.parent)
        found.setdefault(state_of(folder), []).append(folder)
    return found


def test_a_failure_keeps_no_other_run_from_its_end_and_done_ones_are_skipped(tmp_path: Path) -> None:
    words = study(tmp_path, "seed=0 epochs=1", "seed=1 lr=1e30", "seed=2 epochs=1", "seed=3 epochs=1")
    first = called(main, *words)
    assert first.returncode == 1
    found = folders(tmp_path / "runs")
    (failed,) = found[State.FAILED]
    assert len(found[State.DONE]) == 3
    (row,) = [line for line in first.stdout.splitlines() if line.startswith(f"failed: {failed.path.name}: ")]
    assert "is not finite at step" in row
    assert str(failed.path / "run.log") in row
    assert "3 of 4 runs done, 1 failed" in first.stdout
    before = {folder.path: folder.done_path.stat().st_mtime_ns for folder in found[State.DONE]}
    again = called(main, *words)
    assert again.returncode == 1
    assert "is not finite at step" in again.stdout
    assert {path: (path / "DONE").stat().st_mtime_ns for path in before} == before
    others = study(tmp_path / "stopped", "seed=0 lr=1e30", "seed=1 epochs=1")
    stopped = called(main, *others, "--jobs", "1", "--on-error", "stop")
    assert stopped.returncode == 1
    assert "0 of 2 runs done, 1 failed, 1 left" in stopped.stdout


def test_two_sweeps_of_one_study_share_its_runs(tmp_path: Path) -> None:
    words = study(tmp_path, *(f"seed={seed} epochs=2" for seed in range(6)))
    command = [sys.executable, "-m", "experiments.sweep", *words]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=LIMIT_S)[0] for process in both]
    assert {process.returncode for process in both} <= {0, 1}, said  # 1 where the other had its last run
    assert not any("failed: " in each for each in said)
    done = [line for each in said for line in each.splitlines() if line.startswith("done: ")]
    assert len(done) == len(set(done)) == 6
    assert called(main, *words).returncode == 0


def test_a_run_that_is_killed_harms_no_other(tmp_path: Path) -> None:
    words = study(tmp_path, "seed=0 epochs=200", "seed=1 epochs=1", "seed=2 epochs=1")
    first, *_ = (folder_of(config) for config in compose_runs(jobs_of(words[0], words[1:2])))

    def kill_first() -> None:
        wait_until(lambda: first.steps_path.exists() and first.steps_path.stat().st_size, "a step")
        owner = first.owner()
        assert owner is not None
        os.kill(owner.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_first)
    thread.start()
    ended = called(main, *words)
    thread.join()
    assert ended.returncode == 1
    assert f"failed: {first.path.name}: killed by SIGKILL" in ended.stdout
    assert "2 of 3 runs done, 1 failed" in ended.stdout


def test_a_job_of_a_launcher_that_ends_without_a_result_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    (tmp_path / "sitecustomize.py").write_text(  # Python imports it at its start: jobs are killed then
        "import os, sys\nif 'submitit.core._submit' in sys.orig_argv:\n    os.kill(os.getpid(), 9)\n"
    )
    words = ["model=mlp", "dataset=synthetic", "cluster=simulated", "cluster.world_size=2", f"output={tmp_path}/runs"]
    launcher = ["-m", "hydra/launcher=submitit_local", f"hydra.sweep.dir={tmp_path}/sweep"]
    done = run(*launcher, *words, "seed=0,1", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "submitit" in told
    assert all(folder_of(config).path.name in told for config in compose_runs([[*words, f"seed={n}"] for n in (0, 1)]))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_saves_all_runs_starts_none_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    epochs = 60 if number == signal.SIGTERM else 2000  # the first study is then carried out to its end
    words = study(tmp_path, f"seed=0 epochs={epochs}", f"seed=1 epochs={epochs}", "seed=2 epochs=1")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments.sweep", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: len([path for path in tmp_path.glob("runs/*/steps.jsonl") if path.stat().st_size]) == 2, "runs"
        )
        children = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        process.send_signal(number)
        assert process.wait(timeout=LIMIT_S) == code
    finally:
        process.kill()
        process.wait()
    assert len(children) >= 2
    wait_until(lambda: not any(map(is_alive, children)), "the end of all processes")
    found = folders(tmp_path / "runs")
    assert len(found[State.STOPPED]) == 2
    saved = {folder.path.name: saved_step(folder) for folder in found[State.STOPPED]}
    assert all(saved.values())
    if number == signal.SIGKILL:
        return
    again = called(main, *words, "--jobs", "1")
    assert again.returncode == 0, again.stderr
    assert "3 of 3 runs done, 0 failed" in again.stdout
    for name, step in saved.items():
        assert json.loads((tmp_path / "runs" / name / "manifest.json").read_text())["began_at_step"] == step
