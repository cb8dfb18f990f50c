"""Steps at a density of 1: a dense all-reduce, without copies of the vector, and what they leave behind."""

from contextlib import closing

import pytest
import torch
from torch import Tensor

import micro
from micro.codecs.raw import Raw
from micro.comm import Comm
from micro.drivers.reductions import restore_, set_aside_
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from micro.requests import carried_out

NUMEL, CPU = 1000, torch.device("cpu")
LAYOUT = micro.Layout.flat(NUMEL)
WARM_UP = micro.WarmUp(density=0.1, start_density=1.0, steps=4, stages=1)


def drawn(step: int, world_size: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(world_size, NUMEL, generator=torch.Generator().manual_seed(step)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_update_is_that_of_dense_training_bit_for_bit(dtype: torch.dtype) -> None:
    sparse = micro.Simulation(micro.SparseReducer(micro.TopK(), 1.0), LAYOUT, 3, dtype=dtype)
    dense = micro.Simulation(micro.DenseReducer(), LAYOUT, 3, dtype=dtype)
    with closing(sparse), closing(dense):
        for step in range(4):
            grads = drawn(step, dtype=dtype)
            assert torch.equal(sparse.step(grads).update, dense.step(grads).update)
            assert not any(residual.any() for residual in sparse.residuals())


def reduce(reducer: micro.Reducer, state: BucketState, step: int) -> Outcome:
    comm = Comm()
    comm.begin_step()
    return carried_out(reducer.reduction(state, drawn(step, 1)[0], comm), comm)


@pytest.mark.parametrize("codec", [Raw(), micro.Int8()])
def test_messages_have_the_same_memory_until_the_density_falls(codec: micro.Codec) -> None:
    reducer = micro.SparseReducer(micro.TopK(), WARM_UP, codec=codec)
    state = reducer.start(LAYOUT, torch.float32, CPU)
    residual, places = state.residual, []
    for step in range(4):
        reduce(reducer, state, step).deliver()
        assert state.residual is residual, "drivers hold the tensor"
        assert state.spare is not None
        places.append({residual.data_ptr(), state.spare.data_ptr()})
    assert places[3] == places[1] == places[2]
    reduce(reducer, state, 4).deliver()
    assert state.spare is None
    assert residual.any()


@pytest.mark.parametrize("codec", [Raw(), micro.Int8()])
def test_a_step_that_is_dropped_leaves_the_accumulator_and_harms_none_after_it(codec: micro.Codec) -> None:
    reducer = micro.SparseReducer(micro.TopK(), 1.0, codec=codec)
    state = reducer.start(LAYOUT, torch.float32, CPU)
    expected = torch.zeros(NUMEL)
    for step in range(6):
        outcome = reduce(reducer, state, step)
        if step % 3 == 2:
            outcome.deliver()
            torch.testing.assert_close(state.residual + outcome.grad, drawn(step, 1)[0] + expected)
            expected = state.residual.clone()
            continue
        outcome.drop()
        assert not outcome.grad.any()
        expected = drawn(step, 1)[0] + expected
        assert torch.equal(state.residual, expected)


@pytest.mark.parametrize("outer", ["sparse", "split", "two_level"])
def test_what_was_set_aside_comes_back_though_the_vector_has_other_memory(outer: str) -> None:
    reducer: micro.Reducer = micro.SparseReducer(micro.TopK(), 1.0)
    if outer == "split":
        reducer = micro.Split(reducer=reducer, dense=("none",))
    if outer == "two_level":
        reducer = micro.TwoLevel(reducer=reducer, ranks_per_node=1)
    state = reducer.start(micro.Layout(("used", "unused"), ((NUMEL - 4,), (4,))), torch.float32, CPU)
    set_aside = set_aside_(state, ["unused"])  # of two levels nothing is kept before the first step
    reduce(reducer, state, 0).deliver()
    restore_(state, set_aside)
    state.pieces()["residual"]["unused"].fill_(3.0)
    set_aside = set_aside_(state, ["unused"])
    reduce(reducer, state, 1).deliver()
    restore_(state, set_aside)
    assert state.residual.tolist() == [0.0] * (NUMEL - 4) + [3.0] * 4
    set_aside = set_aside_(state, ["unused"])
    reduce(reducer, state, 2).drop()
    restore_(state, set_aside)
    assert state.residual[:-4].all()
    assert state.residual[-4:].tolist() == [3.0] * 4
