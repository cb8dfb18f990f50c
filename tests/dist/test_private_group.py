"""How a process group on NCCL differs from one on gloo, on stand-ins: it is split, and its abort waits for others."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from micro.comm.group import PrivateComm
from tests.dist.on_ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
DEVICE = torch.device("cpu", 0)


@on_ranks(2)
def test_no_communicator_is_split_which_would_wait_for_the_whole_world() -> None:
    """Torch looks for none to split, and the default group stays bound, where a rank makes a group alone."""
    looked: list[object] = []
    find, c10d._get_split_source = c10d._get_split_source, lambda *given: looked.append(given)  # None: nothing to split
    world = dist.group.WORLD
    world.bound_device_id = DEVICE
    try:
        if dist.get_rank() == 0:
            PrivateComm(None, torch.device("cpu"), ranks=range(1)).close()
        assert not looked
        assert world.bound_device_id == DEVICE
    finally:
        world.bound_device_id = None
        c10d._get_split_source = find
    PrivateComm(None, torch.device("cpu")).close()  # all ranks name the next group alike


def test_an_abort_that_waits_for_others_holds_up_nobody(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    comm, others_abort = PrivateComm(None, torch.device("cpu")), threading.Event()
    group = comm.group
    monkeypatch.setattr(type(group), "name", lambda _: "nccl")
    monkeypatch.setattr(type(group), "abort", lambda _: others_abort.wait(60))
    try:
        comm.abort(LookupError("of this rank"))  # whoever waits for a future is released after it
        assert not others_abort.is_set()
        with pytest.raises(RuntimeError, match="given up"):
            _ = comm.group
    finally:
        others_abort.set()
