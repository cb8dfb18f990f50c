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

from experiments.runs.records import read_records
from tests.dist.commands import ROOT
from tests.dist.rank_functions import train
from tests.finished_runs import only_run
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
WORDS = [
    *("model=mlp", "dataset=synthetic", "dataset.settings.num_samples=2048", "batch_size=8", "epochs=3"),
    *("sparsifier=exdyna", "density=0.05", "checkpoint.every_steps=10"),
]
SIMULATED = ["cluster=simulated", "cluster.world_size=2"]
LOCAL = ["cluster.nproc_per_node=2"]
NUM_STEPS = 384
COMMAND = [sys.executable, "-m", "experiments.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]


def digest_of(output: Path) -> str:
    return json.loads((only_run(output) / "DONE").read_text())["weights_sha256"]


def disturb(command: list[str], output: Path, *strikes: Callable[[int], None]) -> tuple[int, str]:
    """Start a run, strike it each time it has taken some steps, and return how it ended."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    errors = output.with_suffix(".err")
    with errors.open("w") as err:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=err)
        try:
            for strike in strikes:
                wait_for_steps(output, process)
                strike(process.pid)
            process.wait(timeout=LIMIT_S)
        finally:
            process.kill()
            process.wait()
    return process.returncode, errors.read_text()


def wait_for_steps(output: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait for 25 steps more than are recorded now."""
    enough, deadline = num_rows(output) + 25, time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if num_rows(output) >= enough:
            return
        time.sleep(0.01)
    raise AssertionError(f"no {enough} steps, exit code {process.poll()}")


def num_rows(output: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in output.glob("*/steps.jsonl"))


def to_parent(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def kill_one(pid: int) -> None:
    """Kill the last of the processes that train, whoever started it."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    named = [child for child in children if b"experiments" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(named[-1], signal.SIGKILL)


def check_records(output: Path) -> None:
    folder = only_run(output)
    assert [row["step"] for row in read_records(folder / "steps.jsonl")] == list(range(NUM_STEPS))
    assert [row["epoch"] for row in read_records(folder / "epochs.jsonl")] == [0, 1, 2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the run undisturbed: simulated ranks end with the same as processes."""
    output = tmp_path_factory.mktemp("whole")
    undisturbed = train(*WORDS, *SIMULATED, f"output={output}")
    assert undisturbed.returncode == 0, undisturbed.stderr
    return digest_of(output)


def test_a_simulated_run_that_is_killed_ends_with_the_same_weights(tmp_path: Path, whole: str) -> None:
    output = tmp_path / "runs"
    words = [*WORDS, *SIMULATED, f"output={output}"]
    ended, errors = disturb([*COMMAND, *words], output, to_parent(signal.SIGKILL))
    assert ended == -signal.SIGKILL, errors
    again = train(*words)
    assert again.returncode == 0, again.stderr
    assert "resumed from step" in again.stderr
    assert digest_of(output) == whole
    check_records(output)


def test_a_run_that_is_stopped_in_every_way_ends_with_the_same_weights(tmp_path: Path, whole: str) -> None:
    """One run: a rank dies and all restart; Ctrl-C; under torchrun a rank dies and all restart. SIGKILL: test_train."""
    output = tmp_path / "runs"
    words = [*WORDS, *LOCAL, f"output={output}"]
    ended, errors = disturb([*COMMAND, *words, "cluster.max_restarts=1"], output, kill_one, to_parent(signal.SIGINT))
    assert ended == 128 + signal.SIGINT, errors  # it went on after its rank had died
    assert "resumed from step" in errors
    assert "stopped by Ctrl-C, saved as " in errors
    assert "run the same command to resume" in errors
    saved = num_rows(output)
    ended, errors = disturb([*TORCHRUN, "--monitor-interval=0.1", "-m", "experiments.train", *words], output, kill_one)
    assert ended == 0, errors
    resumed = int(errors.split("resumed from step ")[1].split(":")[0])
    assert resumed > saved, "torchrun started the ranks once"
    assert digest_of(output) == whole
    check_records(output)
