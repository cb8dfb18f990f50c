"""What a rank computes for one bucket does not grow with the number of ranks: operations are counted, not timed."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import micro
from micro.zoo.exdyna import ExDyna
from tests.mirrored_ranks import MirroredComm

NUMEL, DENSITY, FEW, MANY = 40_960, 0.05, 4, 1024
METHODS = {
    "micro": micro.SparseReducer(micro.Micro(), DENSITY),
    "micro gather": micro.SparseReducer(micro.Micro(), DENSITY, micro.Gather()),
    "micro published": micro.SparseReducer(micro.Micro(rule="published"), DENSITY),
    "exdyna": micro.SparseReducer(ExDyna(), DENSITY),
    "leader": micro.SparseReducer(micro.Leader(), DENSITY),
    "random-k": micro.SparseReducer(micro.RandomK(), DENSITY),
}
ONCE_IN_A_WHILE = 14  # what a remainder to share among the ranks, or a tie, may take in one step and not in another


class Counting(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    num_operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        return function(*args, **(kwargs or {}))


def operations(reducer: micro.Reducer, world_size: int) -> int:
    """Return how many operations one rank's step takes at the least: of a few steps in steady state."""
    comm, state = MirroredComm(world_size), reducer.start(micro.Layout.flat(NUMEL), torch.float32, torch.device("cpu"))
    randomness, counted = torch.Generator().manual_seed(3), []
    for _ in range(6):
        grad = torch.randn(NUMEL, generator=randomness)
        state.residual.zero_()  # others appear to choose in this rank's slice, so what is kept means nothing
        comm.begin_step()
        with Counting() as counting:
            reducer.reduce_(state, grad, comm)
        counted.append(counting.num_operations)
    return min(counted[2:])


@pytest.mark.parametrize("method", METHODS)
def test_operations_of_a_step_do_not_grow_with_the_ranks(method: str) -> None:
    assert operations(METHODS[method], MANY) <= operations(METHODS[method], FEW) + ONCE_IN_A_WHILE
