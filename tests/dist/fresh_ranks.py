"""New ranks for every call, quickly: forked from one process that has imported what they need.

A killed process, and the one that resumes after it, are two processes. The ranks of ``tests/dist/processes.py`` stay
up; processes that start from nothing import torch and a framework first, which takes many times as long as a small
training.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from tests.dist.processes import PRELOADED, save_coverage
from tests.ports import free_port


def run_fresh(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``work(*args)`` on new processes with the environment of torchrun; return the results in rank order.

    Args:
        work: a function of a module, so that the processes can import it.

    Raises:
        torch.multiprocessing.ProcessException: a rank raised an exception or was killed; then all have ended.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="micro-tests-") as folder:
        start_processes(
            _be_rank,
            (world_size, free_port(), Path(folder), work, args),
            nprocs=world_size,
            daemon=True,
            start_method="forkserver",
        )
        return [torch.load(_result(Path(folder), rank), weights_only=False) for rank in range(world_size)]


def _be_rank(
    rank: int, world_size: int, port: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(torch.get_num_threads())  # a fork has none of torch's threads: one thread must make them anew
    torch.save(work(*args), _result(folder, rank))
    save_coverage()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"
