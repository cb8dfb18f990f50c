"""Steps at a density of 1: a dense all-reduce, without copies of the vector, and what they leave behind."""

import pytest
import torch
from torch import Tensor

import micro
from micro.codecs.raw import Raw
from micro.comm.ranks import Comm
from micro.drivers.unused import restore_, set_aside_
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from tests.parts import CPU, alone, normal

NUMEL = 1000
WARM_UP = micro.WarmUp(density=0.1, start_density=1.0, steps=4, stages=1)
WHOLE = micro.SparseReducer(micro.TopK(), 1.0)


def drawn(step: int) -> Tensor:
    return normal(NUMEL, seed=step, dtype=torch.float32)


def reduce(reducer: micro.Reducer, state: BucketState, step: int) -> Outcome:
    comm = Comm()
    comm.begin_step()
    return alone(reducer.reduction(state, drawn(step), comm))


def started(reducer: micro.Reducer) -> BucketState:
    return reducer.start(micro.Layout(("used", "unused"), ((NUMEL - 4,), (4,))), torch.float32, CPU)


@pytest.mark.parametrize("codec", [Raw(), micro.Int8()])
def test_a_step_that_is_dropped_leaves_the_accumulator_and_harms_none_after_it(codec: micro.Codec) -> None:
    reducer = micro.SparseReducer(micro.TopK(), 1.0, codec=codec)
    state, expected = started(reducer), torch.zeros(NUMEL)
    for step in range(6):
        outcome, expected = reduce(reducer, state, step), drawn(step) + expected
        if step % 3 == 2:
            outcome.deliver()
            torch.testing.assert_close(state.residual + outcome.grad, expected)
            expected = state.residual.clone()
        else:
            outcome.drop()
            assert not outcome.grad.any()
            assert torch.equal(state.residual, expected)


@pytest.mark.parametrize(
    "reducer", [WHOLE, micro.Split(reducer=WHOLE, dense=("none",)), micro.TwoLevel(reducer=WHOLE, ranks_per_node=1)]
)
def test_what_was_set_aside_comes_back_though_the_vector_has_other_memory(reducer: micro.Reducer) -> None:
    state = started(reducer)  # two levels keep nothing before the first step
    for step in range(3):
        set_aside = set_aside_(state, ["unused"])
        outcome = reduce(reducer, state, step)
        (outcome.drop if step == 2 else outcome.deliver)()
        restore_(state, set_aside)
        if step == 0:
            state.pieces()["residual"]["unused"].fill_(3.0)
        assert state.residual[-4:].tolist() == [3.0] * 4
        assert state.residual[:-4].any() == (step == 2)
