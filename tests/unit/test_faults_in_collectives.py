"""One rank's request fails or never comes: in every method, at every point of a step.

All ranks end with an error that names the rank; a step that was broken off is not gone on from, and a run that is
resumed from what was saved before equals one that was never disturbed, bit for bit.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from tests.faults import Fault, FaultyRanks, How, InjectedError, LeftError
from tests.parts import normal
from tests.products import TIER, grid
from tests.sparsifiers import TABLE

LAYOUT = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (8,), (11, 11)))
DENSITY, CPU = 0.05, torch.device("cpu")
METHODS = {row.name: row.make(DENSITY, 0) for row in TABLE if TIER == "all" or "published" not in row.name}
PEER = {
    "fails": "rank {rank} failed: InjectedError: in {op}",
    "fails after": "rank {rank} failed: InjectedError: in {op}",
    "leaves": "rank {rank} ended without coming to ",
}


@cache
def ranks_of(world_size: int) -> FaultyRanks:
    return FaultyRanks(world_size)


class Run:
    """Steps of a method on some ranks."""

    def __init__(self, method: str, world_size: int, saved: list[dict[str, Any]] | None = None) -> None:
        self.reducer, self.ranks, self.world_size = METHODS[method], ranks_of(world_size), world_size
        if saved is None:
            self.states = [self.reducer.start(LAYOUT, torch.float32, CPU) for _ in range(world_size)]
        else:
            self.states = [self.reducer.load(rank, torch.float32, CPU) for rank in saved]

    def step(self, index: int, fault: Fault | None = None) -> list[Any]:
        """Return each rank's update, or its error."""
        grads = normal(self.world_size, LAYOUT.numel, seed=index, dtype=torch.float32)

        def reduce(comm: Comm) -> Reduction[Tensor]:
            comm.begin_step()
            yield from self.reducer.step(self.states[comm.rank], grads[comm.rank], comm)
            return grads[comm.rank]

        return self.ranks.run(reduce, fault)


@dataclass(frozen=True)
class Undisturbed:
    """A run: what was saved after the first step, the next two updates, and the calls of each rank in the second."""

    saved: list[dict[str, Any]]
    updates: list[list[Tensor]]
    called: list[list[str]]


@cache
def undisturbed(method: str, world_size: int) -> Undisturbed:
    run = Run(method, world_size)
    run.step(0)
    saved = [run.reducer.save(state) for state in run.states]
    second, called = run.step(1), run.ranks.called
    return Undisturbed(saved, [second, run.step(2)], called)


def assert_ended_by(fault: Fault, ended: list[Any], whole: Undisturbed, op: str) -> None:
    """All ranks but those that had done the step already say which rank ended it, and how."""
    errors = {rank: error for rank, error in enumerate(ended) if isinstance(error, Exception)}
    own = errors.pop(fault.rank)
    assert isinstance(own, LeftError if fault.how == "leaves" else InjectedError)
    for error in errors.values():
        assert isinstance(error, micro.PeerError)
        assert str(error).startswith(PEER[fault.how].format(rank=fault.rank, op=op))
    for rank in set(range(len(ended))) - {fault.rank, *errors}:
        assert torch.equal(ended[rank], whole.updates[0][rank])


@grid(method=METHODS, how=[*PEER], world_size=[2, 4], point=["first", "middle", "last"], hit=["first", "last"])
def test_all_ranks_end_and_a_resumed_run_is_as_if_nothing_had_happened(
    method: str, how: How, world_size: int, point: str, hit: str
) -> None:
    whole, rank = undisturbed(method, world_size), 0 if hit == "first" else world_size - 1
    called = whole.called[rank]
    at = {"first": 0, "middle": len(called) // 2, "last": len(called) - 1}[point]
    run, fault = Run(method, world_size, whole.saved), Fault(how, rank, at)
    ended = run.step(1, fault)
    assert_ended_by(fault, ended, whole, called[at])
    assert how == "leaves" or run.ranks.raised is ended[rank]
    assert_refuses(run, ended)
    resumed = Run(method, world_size, whole.saved)
    for index, expected in enumerate(whole.updates, start=1):
        assert all(map(torch.equal, resumed.step(index), expected))


def assert_refuses(run: Run, ended: list[Any]) -> None:
    """A rank with an unfinished step neither continues nor saves, and says why in one line."""
    for state, error in zip(run.states, ended, strict=True):
        if isinstance(error, Tensor):
            continue
        for use in (lambda: run.reducer.save(state), lambda: run.reducer.reduce_(state, torch.ones(1), Comm())):  # noqa: B023
            with pytest.raises(RuntimeError, match=r"^step \d+ broke off \(.*\), and ranks may .*: load a state .*$"):
                use()
