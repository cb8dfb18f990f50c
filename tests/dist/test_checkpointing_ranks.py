"""Runs that are killed and started again by the same command, as a user has them: real processes and signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.runs.json_lines import read_records
from tests.dist.commands import ROOT, only_run, run

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("checkpoints")]
WORDS = [
    *("model=mlp", "dataset=synthetic", "dataset.settings.num_samples=2048", "batch_size=8", "epochs=3"),
    *("sparsifier=exdyna", "density=0.05", "checkpoint.every_steps=10"),
]
SIMULATED = ["cluster=simulated", "cluster.world_size=2"]
LOCAL = ["cluster.nproc_per_node=2"]
NUM_STEPS = 384
EXIT_SAVED = 75


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    for name, cluster in {"simulated": SIMULATED, "local": LOCAL}.items():
        done = run(*WORDS, *cluster, f"output={folder / name}")
        assert done.returncode == 0, done.stderr
    return folder


def digest_of(output: Path) -> str:
    return json.loads((only_run(output) / "DONE").read_text())["weights_sha256"]


def disturb(
    command: list[str], output: Path, strike: Callable[[int, Path], None], *, num_steps: int = 25
) -> tuple[int, str]:
    """Start a run, strike it when it has taken some steps, and return how it ended."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    errors = output.with_suffix(".err")
    with errors.open("w") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=err)
        try:
            strike(process.pid, wait_for_steps(output, num_steps, process))
            process.wait(timeout=60)
        finally:
            process.kill()
            process.wait()
    return process.returncode, errors.read_text()


def wait_for_steps(output: Path, num_steps: int, process: subprocess.Popen[bytes]) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for path in output.glob("*/steps.jsonl"):
            if path.read_bytes().count(b"\n") >= num_steps:
                return path.parent
        time.sleep(0.01)
    raise AssertionError(f"no {num_steps} steps, exit code {process.poll()}")


def to_parent(number: int) -> Callable[[int, Path], None]:
    return lambda pid, folder: os.kill(pid, number)


STOPS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGUSR1: EXIT_SAVED}


@pytest.mark.parametrize(
    ("name", "cluster", "numbers"),
    [("simulated", SIMULATED, [signal.SIGKILL]), ("local", LOCAL, [signal.SIGUSR1, signal.SIGKILL, signal.SIGTERM])],
    ids=["simulated", "local"],
)
def test_a_run_that_is_stopped_ends_with_the_same_weights(
    tmp_path: Path, whole: Path, name: str, cluster: list[str], numbers: list[signal.Signals]
) -> None:
    output = tmp_path / "runs"
    words = [*WORDS, *cluster, f"output={output}"]
    for attempt, number in enumerate(numbers):
        command = [sys.executable, "-m", "experiments.train", *words]
        ended, errors = disturb(command, output, to_parent(number), num_steps=25 + 100 * attempt)
        assert ended == STOPS[number], errors
        if number == signal.SIGUSR1:
            assert "run the same command to resume" in errors
    again = run(*words)
    assert again.returncode == 0, again.stderr
    assert "resumed from step" in again.stderr
    assert digest_of(output) == digest_of(whole / name)
    folder = only_run(output)
    assert [row["step"] for row in read_records(folder / "steps.jsonl")] == list(range(NUM_STEPS))
    assert [row["epoch"] for row in read_records(folder / "epochs.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("launcher", ["torchrun", "own"])
def test_restarts_go_on_by_themselves(tmp_path: Path, whole: Path, launcher: str) -> None:
    output = tmp_path / "runs"
    words = [*WORDS, *LOCAL, f"output={output}"]
    own = [sys.executable, "-m", "experiments.train", *words, "cluster.max_restarts=1"]
    elastic = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *elastic, "-m", "experiments.train", *words]
    ended, errors = disturb(own if launcher == "own" else torchrun, output, kill_one)
    assert ended == 0, errors
    assert "resumed from step" in errors
    assert digest_of(output) == digest_of(whole / "local")


def kill_one(pid: int, folder: Path) -> None:
    """Kill the last of the processes that train, whoever started it."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    named = [child for child in children if b"experiments" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(named[-1], signal.SIGKILL)
