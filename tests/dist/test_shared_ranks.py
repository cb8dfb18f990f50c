"""The ranks that tests share: a function may make a group of its own, and the next test finds the shared one again."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.dist.processes import RankError, Ranks, ranks
from tests.dist.rank_functions import add

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


def in_a_group_of_its_own(leaves: bool) -> tuple[int, str, str]:
    """Do as a script does that torchrun starts."""
    was_in_a_group = dist.is_initialized()
    os.environ["SET_BY"] = "a framework"
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if leaves:
        dist.destroy_process_group()
    return int(total), os.environ["LOCAL_RANK"], "in a group" if was_in_a_group else "alone"


@pytest.mark.parametrize("leaves", [True, False])
def test_a_function_makes_its_own_group_and_the_ranks_come_back(leaves: bool) -> None:
    pids = ranks(2).run(os.getpid)
    assert ranks(2).run_apart(in_a_group_of_its_own, leaves) == [(2, "0", "alone"), (2, "1", "alone")]
    assert ranks(2).run(os.getenv, "SET_BY") == [None, None]
    assert ranks(2).run(add, 3.0) == [6.0, 6.0]
    assert ranks(2).run(os.getpid) == pids


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_a_test_kills_are_replaced() -> None:
    alone = Ranks(1)  # not the shared ones, which the next test would have to start
    with pytest.raises(RankError, match="rank 0 failed: killed by SIGKILL"):
        alone.run_apart(die)
    assert alone.run_apart(in_a_group_of_its_own, True) == [(1, "0", "alone")]
    alone.close()
