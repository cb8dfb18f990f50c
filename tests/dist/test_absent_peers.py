"""A rank that stays away from a collective, or stands still, is named by those that wait, within their timeout."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from micro.group_comm import GroupComm
from micro.peer_failures import PeerError
from micro.private_comm import PrivateComm
from micro.requests import AllGather, AllReduce
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]
LIMIT_S = 6.0
CPU = torch.device("cpu")


def wait_in_vain(comm: GroupComm) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        comm.answer(AllReduce(mine=torch.ones(3)))
    return str(caught.value), time.monotonic() - started


def timeout_s(comm: GroupComm) -> float:
    assert comm.group is not None
    return float(comm.group._get_backend(CPU).options._timeout.total_seconds())


def stay_away(absent: int, *, stands_still: bool) -> tuple[list[float], str, float]:
    """Return the timeouts of the groups made from another's, and how the wait for ``absent`` ended."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    store = dist.distributed_c10d._get_default_store()
    comm = PrivateComm(None, CPU)
    within = comm.levels(2, CPU).within
    assert isinstance(within, GroupComm)
    timeouts = [timeout_s(comm), timeout_s(within)]
    comm.answer(AllReduce(mine=torch.ones(3)))
    pids = comm.answer(AllGather(mine=torch.tensor([os.getpid()]))).flatten().tolist()
    if dist.get_rank() != absent:
        try:
            return timeouts, *wait_in_vain(comm)
        finally:
            os.kill(pids[absent], signal.SIGCONT)
            store.set("over", "1")
    if stands_still:
        os.kill(os.getpid(), signal.SIGSTOP)
    with suppress(RuntimeError):  # the others may have left already
        store.wait(["over"], timedelta(seconds=300))
    return timeouts, "", 0.0


def stand_still_on_rank_0() -> tuple[list[float], str, float]:
    return stay_away(0, stands_still=True)


def stay_away_on_rank_1() -> tuple[list[float], str, float]:
    return stay_away(1, stands_still=False)


def test_a_time_out_names_the_rank_that_did_not_come() -> None:
    (timeouts, message, _), _ = ranks(2).run_apart(stay_away_on_rank_1)
    assert timeouts == [LIMIT_S, LIMIT_S]
    assert message.startswith("rank 1 did not come to a collective within ")


def test_a_store_whose_host_stands_still_holds_nobody_up() -> None:
    """Rank 0 has the store: a read of it never ends."""
    _, (_, message, seconds) = ranks(2).run_apart(stand_still_on_rank_0)
    assert message.startswith("lost contact with rank 0: ")
    assert seconds < 200
