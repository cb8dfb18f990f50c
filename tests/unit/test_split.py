"""Split: which parameters are dense, what becomes of their states, and what a dense start does."""

from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.checkpoints.resizing import average
from micro.comm import Comm
from tests.parts import CPU, kept, normal, simulated
from tests.refusals import refused

LAYOUT = micro.Layout(
    ("body.weight", "body.bias", "norm.weight", "head.weight", "head.bias"), ((6, 8), (6,), (6,), (4, 6), (4,))
)
VECTORS, MATRICES = ("body.bias", "norm.weight", "head.bias"), ("body.weight", "head.weight")
NUM_VECTORS, DTYPE = 16, torch.float64
TOPK = micro.SparseReducer(micro.TopK(), density=0.1)


def gradients(step: int, world_size: int = 2) -> Tensor:
    return normal(world_size, LAYOUT.numel, seed=step)


def part(vector: Tensor, names: tuple[str, ...]) -> Tensor:
    pieces = LAYOUT.split(vector)
    return torch.cat([pieces[name] for name in LAYOUT.names if name in names])


@pytest.mark.parametrize(
    "which", [{"min_dims": 2}, {"dense": ("*.bias", "norm*")}, {"only": ("body.w*", "head.weight")}]
)
def test_dense_parameters_get_the_mean_and_the_others_what_the_reducer_alone_gives_them(which: Any) -> None:
    split = simulated(micro.Split(reducer=TOPK, **which), LAYOUT, 2)
    alone = simulated(TOPK, micro.Layout(MATRICES, ((6, 8), (4, 6))), 2)
    for step in range(4):
        grads = gradients(step)
        ours, theirs = split.step(grads), alone.step(torch.stack([part(row, MATRICES) for row in grads]))
        assert torch.equal(part(ours.update, VECTORS), part(grads.mean(0), VECTORS))
        assert torch.equal(part(ours.update, MATRICES), theirs.update)
        stats, inner = ours.stats[0], theirs.stats[0]
        assert stats.dense_numel == NUM_VECTORS
        assert stats.global_count == inner.global_count + NUM_VECTORS
        assert stats.target_density == pytest.approx((inner.target_count + NUM_VECTORS) / LAYOUT.numel)
        assert stats.bytes_sent == inner.bytes_sent + 8 * NUM_VECTORS
        assert stats.calls == (("all_reduce", 8 * NUM_VECTORS), *inner.calls)
    assert not part(split.residuals()[0], VECTORS).any()


def test_buckets_can_be_cut_and_joined_without_losing_a_residual() -> None:
    reducer = micro.Split(reducer=TOPK, dense=("*.bias",))
    whole = reducer.start(LAYOUT, DTYPE, CPU)
    reducer.reduce_(whole, gradients(0, 1)[0], Comm())
    cut = [micro.Layout(LAYOUT.names[places], LAYOUT.shapes[places]) for places in (slice(0, 3), slice(3, None))]
    parts = [reducer.rebuild(layout, [whole], DTYPE, CPU) for layout in cut]
    again = reducer.rebuild(LAYOUT, parts, DTYPE, CPU)
    assert again.step == 1
    assert torch.equal(again.residual, whole.residual)
    assert all(piece.any() != name.endswith(".bias") for name, piece in LAYOUT.split(again.residual).items())


def test_a_dense_start_is_the_mean_and_sends_no_indices() -> None:
    split = simulated(micro.Split(reducer=TOPK, start_step=2), LAYOUT, 2)
    for step in range(4):
        grads = gradients(step)
        out = split.step(grads)
        assert torch.equal(out.update, grads.mean(0)) == (step < 2)
        assert (out.stats[0].indices_bytes == 0) == (step < 2)
        assert (out.stats[0].step, out.stats[0].dense_numel) == (step, LAYOUT.numel if step < 2 else 0)


def test_the_mean_of_residuals_serves_another_number_of_workers() -> None:
    reducer = micro.Split(reducer=TOPK, min_dims=2)
    split = simulated(reducer, LAYOUT, 2)
    split.step(gradients(0))
    (saved,) = average([{"buckets": [rank]} for rank in split.state_dict()["ranks"]], 1)
    state = reducer.load(saved["buckets"][0], DTYPE, CPU)
    assert torch.equal(state.residual, kept(split).mean(0))
    assert state.step == 1


def test_a_state_with_other_dense_parameters_is_refused() -> None:
    reducer = micro.Split(reducer=TOPK, min_dims=2)
    saved = reducer.save(reducer.start(LAYOUT, DTYPE, CPU))
    for other, given in ((micro.Split(reducer=TOPK, dense=("norm*",)), "body.bias"), (TOPK, "split topk")):
        refused(lambda other=other: other.load(saved, DTYPE, CPU), "state", given)
