"""What a rank computes for one bucket does not grow with the number of ranks: operations are counted, not timed."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import micro
from micro import kernels
from micro.zoo.exdyna import ExDyna
from tests.mirrored_ranks import MirroredComm

NUMEL, DENSITY, FEW, MANY = 40_960, 0.05, 4, 1024
GATHER = micro.Gather()
OPERATIONS = {  # of a whole reduction on a CPU, views of tensors among them, with compiled loops and 4 ranks
    "micro": (micro.SparseReducer(micro.Micro(), DENSITY), 37),
    "micro gather": (micro.SparseReducer(micro.Micro(), DENSITY, GATHER), 45),
    "micro slack": (micro.SparseReducer(micro.Micro(slack=0.2), DENSITY), 115),
    "micro repaired": (micro.SparseReducer(micro.Micro(rule="repaired"), DENSITY), 52),
    "micro published": (micro.SparseReducer(micro.Micro(rule="published"), DENSITY), 48),
    "exdyna": (micro.SparseReducer(ExDyna(), DENSITY), 37),
    "leader": (micro.SparseReducer(micro.Leader(), DENSITY), 24),
    "random-k": (micro.SparseReducer(micro.RandomK(), DENSITY), 28),
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


@pytest.mark.parametrize("method", OPERATIONS)
def test_operations_of_a_step_are_few_and_do_not_grow_with_the_ranks(method: str) -> None:
    reducer, most = OPERATIONS[method]
    few = operations(reducer, FEW)
    assert operations(reducer, MANY) <= few + ONCE_IN_A_WHILE
    if not kernels.compiled(torch.ones(1)):
        pytest.skip("the loops are not compiled here: numba is not installed")
    assert few <= most
