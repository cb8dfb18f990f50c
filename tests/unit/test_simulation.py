"""n ranks in one process: steps, state and errors of a simulation."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from tests.parts import normal
from tests.refusals import refused

LAYOUT = micro.Layout(("a", "b"), ((6, 5), (20,)))
WORLD_SIZE = 3


def build(world_size: int = WORLD_SIZE) -> micro.Simulation:
    return micro.Simulation(micro.SparseReducer(micro.TopK(), 0.1), LAYOUT, world_size)


@pytest.fixture
def simulation() -> micro.Simulation:
    return build()


def gradients(step: int = 0) -> Tensor:
    return normal(WORLD_SIZE, LAYOUT.numel, seed=step, dtype=torch.float32)


def test_step_copies_what_it_is_given_and_what_it_returns(simulation: micro.Simulation) -> None:
    grads = gradients()
    given, result = grads.clone(), simulation.step(grads, residuals=True)
    assert torch.equal(grads, given)
    assert [stats.local_count for stats in result.stats] == [5] * WORLD_SIZE
    kept = result.residuals.clone()
    simulation.step(gradients(1))
    assert torch.equal(result.residuals, kept)
    assert not torch.equal(torch.stack(simulation.residuals()), kept)


@pytest.mark.parametrize("shape", [(2, 50), (3, 49), (50,)])
def test_gradients_must_be_of_the_simulation(simulation: micro.Simulation, shape: tuple[int, ...]) -> None:
    refused(lambda: simulation.step_(torch.zeros(shape)), "gradients must be (3, 50) of torch.float32", shape)
    refused(lambda: simulation.step_(gradients().double()), "gradients must be (3, 50)", "float64")


@pytest.mark.parametrize(
    ("reducer", "world_size", "key", "given"),
    [
        (micro.SparseReducer(micro.TopK(), 0.1), 2, "world_size 2", 3),
        (micro.SparseReducer(micro.Micro(), 0.1), 3, "state is of micro (agreed)", "topk"),
    ],
)
def test_a_state_of_another_world_or_method_is_refused(
    simulation: micro.Simulation, reducer: micro.Reducer, world_size: int, key: str, given: object
) -> None:
    saved = micro.Simulation(reducer, LAYOUT, world_size).state_dict()
    refused(lambda: simulation.load_state_dict(saved), key, given)


def test_a_step_that_an_error_broke_off_is_not_gone_on_from(simulation: micro.Simulation) -> None:
    def fail(comm: Comm) -> Reduction[None]:
        yield from ()
        if comm.rank == 1:
            raise LookupError("words of its own")

    saved = simulation.state_dict()
    with pytest.raises(LookupError, match="words of its own"):
        simulation.step_(gradients(), ahead=fail)
    words = r"^step 0 broke off \(.*LookupError: words of its own\), and ranks may .*: load a state"
    for use in (lambda: simulation.step(gradients()), simulation.state_dict):
        with pytest.raises(RuntimeError, match=words):
            use()
    simulation.load_state_dict(saved)
    other = build()
    assert torch.equal(simulation.step(gradients()).update, other.step(gradients()).update)


def test_derived_statistics() -> None:
    simulation = build(world_size=2)
    apart = torch.zeros(2, 50)
    apart[0, :5], apart[1, 5:10] = 1.0, 1.0
    stats = simulation.step(apart).stats[0]
    assert (stats.local_density, stats.global_density, stats.build_up) == (0.1, 0.2, 2.0)
    assert (stats.density_error, stats.imbalance) == (1.0, 0.0)
    leader = micro.Simulation(micro.SparseReducer(micro.Leader(), 0.1), LAYOUT, 4)
    assert leader.step(torch.ones(4, 50)).stats[0].imbalance == 3.0


@pytest.mark.parametrize("seed", [2**64 - 1, np.int64(3)])
def test_a_seed_may_have_64_bits_or_be_numpy_s(seed: Any) -> None:
    reducer = micro.SparseReducer(micro.RandomK(), 0.1, seed=seed)
    assert micro.Simulation(reducer, micro.Layout.flat(100), 2).step(torch.randn(2, 100)).stats[0].global_count == 10
