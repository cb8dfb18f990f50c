"""What the tests on a real SLURM share: a run of two nodes, its processes, and the weights that it must end with."""

import json
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from experiments.runs.run_folder import RunFolder, folder_of
from experiments.training.preflight import prepare_runs
from experiments.training.runner import execute
from tests.slurm.site import unavailable
from tests.waiting import wait_until

WORDS = [
    *("model=mlp", "dataset=synthetic", "dataset.settings.num_samples=2048", "batch_size=8"),
    *("sparsifier=exdyna", "density=0.05"),
]
QUEUED = [
    *("cluster=slurm", "cluster.nnodes=2", "cluster.slurm.partition=test", "cluster.slurm.time_limit=00:50:00"),
]
STEPS_PER_EPOCH = 128
WAIT_S = 900.0  # for what seconds of a quiet machine are enough; each of these processes imports torch
MARKS = [
    pytest.mark.slurm,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


def ranks_of(job: str) -> list[int]:
    """Return the processes of a job on this machine that are ranks of a run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_text()
            if "training.rank_main" in words and f"\0SLURM_JOB_ID={job}\0" in "\0" + (place / "environ").read_text():
                found.append(int(place.name))
    return found


def two_ranks_of(job: str) -> list[int]:
    """Wait until a job has two ranks, and no child of them; return these."""
    wait_until(lambda: len(ranks_of(job)) == 2, "two ranks", timeout_s=WAIT_S)
    return ranks_of(job)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until_pending(pids: list[int], number: signal.Signals) -> None:
    """Wait until a signal waits for processes that stand still."""
    wait_until(lambda: all(_is_pending(pid, number) for pid in pids), f"{number.name} to {pids}", timeout_s=WAIT_S)


def assert_as_undisturbed(folder: RunFolder, words: Sequence[str], path: Path) -> None:
    """Check that a run of two nodes ended with the weights of the same run, simulated in this process, in ``path``."""
    (config,) = prepare_runs([[*words, "cluster=simulated", "cluster.world_size=2", f"output={path / 'simulated'}"]])
    execute(config)
    one, other = (json.loads(each.done_path.read_text())["weights_sha256"] for each in (folder, folder_of(config)))
    assert one == other


def _is_pending(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = [line.split()[1] for line in lines if line.startswith("ShdPnd:")]
    return bool(int(pending, 16) >> (number - 1) & 1)
