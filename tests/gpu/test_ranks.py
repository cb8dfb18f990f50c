"""Ranks with tensors on GPUs, over gloo on one of them and over NCCL on several; on the CPU these tests are tried."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import micro
from micro.comm.group import GroupComm, PrivateComm
from micro.comm.objects import gather_objects
from micro.comm.ranks import Op
from micro.comm.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Sending
from tests.dist import test_lanes as lanes
from tests.dist import test_rank_states as states
from tests.dist.ddp_steps import (
    DENSE,
    MICRO,
    TINY_MB,
    TOPK,
    Losses,
    Net,
    build,
    ddp_gradients,
    device,
    keep_books,
    one_loss,
    some_unused,
    wrap,
)
from tests.dist.test_attachment_ranks import fail_in, forget_models
from tests.dist.test_gloo_laws import NUMEL, ROWS, all_gradients, reduce_here
from tests.gpu.places import ALONE, NCCL, ON_CPU, SHARED, Place, contexts, memory

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
everywhere = pytest.mark.parametrize("place", [ON_CPU, *SHARED, NCCL])
of_two = pytest.mark.parametrize("place", [ON_CPU, SHARED[0], NCCL])
SMALL: dict[str, Any] = {"bucket_cap_mb": TINY_MB}
STEPS = 4


def updates(names: list[str]) -> dict[str, list[Tensor] | str]:
    """Return this rank's updates by each method, or the error that ended it."""
    found: dict[str, list[Tensor] | str] = {}
    for name in names:
        try:
            found[name] = [update for update, _, _ in reduce_here(name, torch.float64, STEPS)]
        except Exception as error:  # the same on all ranks, or the next method fails too
            found[name] = repr(error)
    return found


@everywhere
def test_every_method_updates_as_in_the_simulation(place: Place) -> None:
    names = list(ROWS)[:: 12 if place.device == "cpu" else 1]
    found = place.run(updates, names)
    wrong = {}
    for name in names:
        simulation = micro.Simulation(
            ROWS[name].make(0.05, 0),
            micro.Layout.flat(NUMEL),
            place.world_size,
            dtype=torch.float64,
            device=place.device,  # whose rounding decides what DEFT's published rule chooses
        )
        for step, rows in zip(range(STEPS), all_gradients(NUMEL, place.world_size, torch.float64), strict=False):
            expected = simulation.step(rows.to(place.device)).update.cpu()
            for of_rank in found:
                if isinstance(of_rank[name], str):
                    wrong[name] = of_rank[name]
                elif not torch.equal(of_rank[name][step], found[0][name][step]):
                    wrong[name] = f"step {step}: replicas drift apart"
                elif not torch.allclose(of_rank[name][step], expected, rtol=1e-6, atol=1e-7):
                    wrong.setdefault(name, f"step {step}: off by {(of_rank[name][step] - expected).abs().max():.0e}")
    assert not wrong


@everywhere
@pytest.mark.parametrize("reducer", [MICRO, TOPK, DENSE, micro.PowerSGD(rank=1)], ids=lambda reducer: reducer.name)
def test_ddp_loses_nothing_of_a_gradient(place: Place, reducer: micro.Reducer) -> None:
    for given, booked, _ in place.run(keep_books, Net, one_loss, reducer, SMALL):
        for name, total in given.items():
            torch.testing.assert_close(booked[name], total, rtol=1e-10, atol=1e-12)


@everywhere
@pytest.mark.parametrize("losses", [one_loss, some_unused])
def test_a_lane_with_a_stream_of_its_own_gives_the_bits_of_one_without(place: Place, losses: Losses) -> None:
    place.run(lanes.test_a_lane_with_a_thread_and_one_without_give_the_same_bits, MICRO, losses, {})


def grown() -> tuple[int, list[int]]:
    """Return by how many bytes what is held grows over many steps, and the GPUs on which there is a context."""
    ddp, attachment = wrap(build(Net), MICRO, **SMALL)
    held = []
    for step in range(60):
        ddp_gradients(ddp, one_loss, step)
        if step in (9, 59):
            attachment.state_dict()
            held.append(memory())
    return held[1] - held[0], contexts()


@everywhere
def test_many_steps_take_no_memory_and_each_rank_its_own_gpu_alone(place: Place) -> None:
    there = max(torch.cuda.device_count(), 1)
    for rank, (growth, own) in enumerate(place.run(grown)):
        assert growth == 0
        assert own == ([] if place.device == "cpu" else [rank % there])


def saved(folder: Path) -> tuple[set[str], list[int]]:
    """Save and resume; return where tensors of all ranks arrive, and the GPUs on which there is a context."""
    states.test_both_ranks_go_on_from_one_checkpoint_bit_for_bit(folder)
    received = gather_objects(torch.ones(3, device=device()))
    return {tensor.device.type for tensor in received if isinstance(tensor, Tensor)}, contexts()


@of_two
def test_saved_states_go_on_bit_for_bit_and_arrive_on_the_cpu(place: Place, tmp_path: Path) -> None:
    there = max(torch.cuda.device_count(), 1)
    for rank, (arrived, own) in enumerate(place.run(saved, tmp_path)):
        assert arrived == {"cpu"}
        assert own == ([] if place.device == "cpu" else [rank % there])


def failed_in(where: str) -> str:
    """Return how a backward of this rank ends that fails on rank 1."""
    ended = fail_in(where, {}, None)
    forget_models()
    return ended


@of_two
@pytest.mark.parametrize("where", ["reducer", "backward"])
def test_an_error_on_one_rank_ends_both_soon(place: Place, where: str) -> None:
    peer, failed = place.run(failed_in, where)
    assert failed in ("InjectedError: in AllGatherLists", "LookupError: backward fails")
    assert place.device == "cuda" or peer == f"PeerError: rank 1 failed: {failed}"


def of_a_part() -> float:
    """Make a group of rank 0, which it alone does, and send over it; then over all ranks."""
    if dist.get_rank() == 0:
        comm = PrivateComm(None, device(), ranks=range(1))
        comm.start([AllReduce(mine=torch.ones(4, device=device()), comm=comm)]).answers()
        comm.close()
    return float(GroupComm().answer(AllReduce(mine=torch.ones(1, device=device()))))


@everywhere
def test_a_part_of_the_world_makes_its_group_without_the_rest(place: Place) -> None:
    assert place.run(of_a_part) == [place.world_size] * place.world_size


def primitives() -> dict[Op, bool]:
    """Return of each collective whether it brings back what a lone rank sends."""
    comm = GroupComm()
    x = torch.arange(1000, device=device(), dtype=torch.int32)
    requests: list[Sending] = [
        AllGather(mine=x, comm=comm),
        AllGatherLists(mine=x.double(), counts=[1000], comm=comm),
        AllReduce(mine=x.float(), comm=comm),
        AllToAll(mine=x.half(), sizes=[1000], received=[1000], comm=comm),
        Broadcast(mine=x.to(torch.uint8), source=0, comm=comm),
    ]
    return {
        request.op: torch.equal(comm.start([request]).answers()[0].flatten(), request.mine.flatten())
        for request in requests
    }


@pytest.mark.parametrize("place", ALONE)
def test_each_collective_brings_back_what_a_lone_rank_sends(place: Place) -> None:
    (same,) = place.run(primitives)
    assert len(same) == 5
    assert all(same.values()), same
