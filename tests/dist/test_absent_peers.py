"""A rank that stays away from a collective, or stands still, is named by those that wait, within their timeout."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from micro.comm.group import PrivateComm
from micro.comm.levels import levels_of
from micro.comm.peers import PeerError
from micro.comm.requests import AllGather, AllReduce
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]
LIMIT_S = 6.0
CPU = torch.device("cpu")


def stay_away(absent: int, *, stands_still: bool) -> str:
    """Return how the wait for ``absent`` ended, with the timeouts of groups that were made from another's."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    store = dist.distributed_c10d._get_default_store()
    comm = PrivateComm(None, CPU)
    within = levels_of(comm, 2, CPU).within
    for each in (comm, within):
        assert each.group._get_backend(CPU).options._timeout.total_seconds() == LIMIT_S
    comm.answer(AllReduce(mine=torch.ones(3)))
    pids = comm.answer(AllGather(mine=torch.tensor([os.getpid()]))).flatten().tolist()
    if dist.get_rank() == absent:
        if stands_still:
            os.kill(os.getpid(), signal.SIGSTOP)
        with suppress(RuntimeError):  # the others may have left already
            store.wait(["over"], timedelta(seconds=300))
        return ""
    started = time.monotonic()
    try:
        with pytest.raises(PeerError) as caught:
            comm.answer(AllReduce(mine=torch.ones(3)))
        assert time.monotonic() - started < 200
        return str(caught.value)
    finally:
        os.kill(pids[absent], signal.SIGCONT)
        store.set("over", "1")


def test_a_time_out_names_the_rank_that_did_not_come() -> None:
    message, _ = ranks(2).run_apart(partial(stay_away, 1, stands_still=False))
    assert message.startswith("rank 1 did not come to a collective within ")


def test_a_store_whose_host_stands_still_holds_nobody_up() -> None:
    """Rank 0 has the store: a read of it never ends."""
    _, message = ranks(2).run_apart(partial(stay_away, 0, stands_still=True))
    assert message.startswith("lost contact with rank 0: ")
