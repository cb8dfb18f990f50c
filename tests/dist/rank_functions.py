"""What ranks of tests call: they add numbers, train, or one of them fails while the others wait for it."""

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from experiments.config.stopping import stop_signals
from micro.comm.group import GroupComm
from micro.comm.requests import AllReduce


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def train(*words: str) -> Ended:
    """Call the main function of experiments.train; on shared ranks it joins them like ranks of torchrun."""
    from experiments import train as command

    return called(command.main, *words)


def called(main: Callable[[], Any], *words: str) -> Ended:
    """Call the main function of a command in this process, as if ``words`` were its command line."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [f"{main.__module__}", *words]
    stop_signals.number = 0  # as in a new process
    code: Any = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main() or 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
    return Ended(code, out.getvalue(), err.getvalue())


def join_where_the_folder_fails(*words: str) -> str:
    """Join the ranks of a run whose folder raises what nobody expects where rank 0 claims it; return what is raised."""
    import pytest

    from experiments.config.compose import compose_run
    from experiments.launching.rank_environment import read_rank_environment
    from experiments.runs.run_folder import RunFolder
    from experiments.training.run import join

    def fail(folder: RunFolder) -> None:
        raise RecursionError("injected")

    given = read_rank_environment()
    assert given
    config = compose_run(list(words), joined_world_size=given.world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "claim", fail)
        with pytest.raises(RuntimeError) as caught:
            join(config, given)
    return str(caught.value)


def add(value: float) -> float:
    print("this is no answer")
    return float(GroupComm().answer(AllReduce(mine=torch.tensor(value))))


def add_but_one(failing: int, how: str) -> float:
    if dist.get_rank() != failing:
        return add(1.0)
    if how == "raise":
        raise ValueError("this rank does\nnot want to")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
    return 0.0
