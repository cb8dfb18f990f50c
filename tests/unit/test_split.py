"""Split: which parameters are dense, what becomes of their states, and what a dense start does."""

from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.checkpoints.resizing import average
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


def test_states_have_a_mean_and_fit_where_the_same_parameters_are_dense() -> None:
    reducer = micro.Split(reducer=TOPK, min_dims=2)
    split = simulated(reducer, LAYOUT, 2)
    split.step(gradients(0))
    (saved,) = average([{"buckets": [rank]} for rank in split.state_dict()["ranks"]], 1)
    saved = saved["buckets"][0]
    assert torch.equal(reducer.load(saved, torch.float64, CPU).residual, kept(split).mean(0))
    for other, given in ((micro.Split(reducer=TOPK, dense=("norm*",)), "body.bias"), (TOPK, "split topk")):
        refused(lambda other=other: other.load(saved, torch.float64, CPU), "state", given)
