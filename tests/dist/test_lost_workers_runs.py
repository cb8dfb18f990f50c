"""A run of local steps whose group shrinks and grows again continues from the last round."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from experiments.config.errors import UserError
from experiments.runs.checkpoints import describe
from experiments.runs.records import read_records
from tests.dist.commands import ROOT
from tests.dist.fresh_ranks import run_fresh
from tests.dist.rank_functions import Ended, train
from tests.finished_runs import only_run
from tests.ports import free_port
from tests.waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("fresh ranks"), pytest.mark.timeout(600)]
WORDS = [
    *("model=mlp", "dataset=synthetic", "dataset.settings.num_samples=512", "batch_size=8", "epochs=3"),
    *("sparsifier=exdyna", "density=0.05", "rounds.every=4", "rounds.lost_workers=go_on", "cluster.world_size=2"),
]


def struck(words: list[str], rank: int, step: int, number: int) -> Ended:
    """Train as a rank that torchrun started; a signal strikes one of them in the middle of a round."""
    from experiments.training.round_workers import RoundWorkers

    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    whole = RoundWorkers.train

    def train_or_die(self: RoundWorkers, place: int, at: int, *rest: Any) -> Any:
        if (self.ranks[place], at) == (rank, step):
            os.kill(os.getpid(), number)
        return whole(self, place, at, *rest)

    RoundWorkers.train = train_or_die  # type: ignore[method-assign]
    return train(*words)


def kept(checkpoint: Path, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint / f"rank{rank}.pt", weights_only=True)["own"]
    return state


def joined(pieces: dict[str, Tensor]) -> Tensor:
    return torch.cat([piece.flatten() for piece in pieces.values()])


def test_a_run_continues_without_a_killed_worker_and_accepts_it_again(tmp_path: Path) -> None:
    words = [*WORDS, f"output={tmp_path}"]
    with pytest.raises(ProcessException):
        run_fresh(2, struck, words, 1, 22, signal.SIGKILL)
    with pytest.raises(ProcessException):
        run_fresh(1, struck, words, 0, 42, signal.SIGKILL)
    for stopped in run_fresh(2, struck, words, 0, 57, signal.SIGTERM):
        assert "stopped by " in stopped.stderr
    folder = only_run(tmp_path)
    checkpoint = max(folder.glob("checkpoints/step-*"))
    assert checkpoint.name.endswith("60"), "the stop was at the end of the round"
    (first,), (second,) = (kept(checkpoint, rank)["buckets"] for rank in (0, 1))
    assert torch.equal(joined(first["start"]), joined(second["start"]))
    assert joined(second["memory"]["residual"]).any(), "who came back takes part"
    for ended in run_fresh(2, struck, words, 0, -1, signal.SIGKILL):
        assert ended.returncode == 0, ended.stderr
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [tuple(group.values()) for group in manifest["groups"]] == [
        (0, 2),
        (20, 1),  # 20 of 32 steps are 40 of the 64 that one rank takes for an epoch
        (40, 2),  # 60 of 64 are 30 of 32
    ]
    assert manifest["steps"] == 40 + 2 + 2 * 32
    assert [row["step"] for row in read_records(folder / "steps.jsonl")] == list(range(manifest["steps"]))
    assert [row["epoch"] for row in read_records(folder / "epochs.jsonl")] == [0, 1, 2]


def test_ranks_that_cannot_go_on_are_refused(tmp_path: Path) -> None:
    (refused,) = run_fresh(1, with_store_of_the_agent, [*WORDS, f"output={tmp_path}"])
    assert refused.returncode == 2
    assert "needs a new store each time that ranks are started: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (
        refused.stderr
    )
    two = ["cluster.world_size=1", *(word for word in WORDS if "world_size" not in word)]
    for refused in run_fresh(2, struck, two, 0, -1, signal.SIGKILL):
        assert refused.returncode == 2
        assert "cluster.world_size is 1, but 2 ranks were started: set it to the number of ranks that" in refused.stderr


def with_store_of_the_agent(words: list[str]) -> Ended:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return struck(words, 0, -1, signal.SIGKILL)


@contextmanager
def agent(words: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start torchrun as the user of one of two nodes does; the first that comes has the store."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    quick = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lost", f"--rdzv-conf={quick}"),
        *("--local-addr=127.0.0.1", "--monitor-interval=0.1", "-m", "experiments.train", *words),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()  # its rank ends with it
            process.wait()


def test_torchrun_continues_with_the_remaining_node(tmp_path: Path) -> None:
    output, port = tmp_path / "runs", free_port()
    words = [*WORDS, "epochs=12", f"output={output}"]
    with agent(words, port, tmp_path / "first.log") as first:
        wait_until(lambda: is_served(port), "the store of the first node")
        with agent(words, port, tmp_path / "second.log"):
            wait_until(lambda: any(map(is_of_two, output.glob("*/checkpoints/step-*"))), "a round of both nodes")
        ended = first.wait(timeout=LIMIT_S)
    log = (tmp_path / "first.log").read_text(errors="replace")
    assert ended == 0, log
    assert "went on with 1 of 2 ranks from step " in log
    folder = only_run(output)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [group["num_ranks"] for group in manifest["groups"]][-2:] == [2, 1], "the first may have begun alone"
    assert [row["step"] for row in read_records(folder / "steps.jsonl")] == list(range(manifest["steps"]))


def is_of_two(checkpoint: Path) -> bool:
    try:
        return describe(checkpoint).world_size == 2
    except UserError:  # a newer one has taken its place
        return False


def is_served(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
