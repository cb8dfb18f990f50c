"""Clipping a gradient before it is reduced: each rank's own norm, one norm for all, or that of a node's shards."""

import math

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.comm.loop import carried_out
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.values.clipping import clip_
from tests.products import grid
from tests.small_models import gradient, wrapped


@grid(dtype=[torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_do_not_overflow_where_elements_do_not(dtype: torch.dtype) -> None:
    """Half precision has no norm above 65,504, single precision none of elements above 1e19."""
    size = 3e4 if dtype.itemsize == 2 else 3e30
    parts = [torch.full((40,), size, dtype=dtype), torch.full((60,), -size, dtype=dtype), torch.zeros(3)]
    carried_out(clip_(parts, 1.0), Comm())
    assert math.hypot(*torch.cat([part.double() for part in parts]).tolist()) == pytest.approx(1.0, rel=1e-2)


def clipped(grads: Tensor, limit: float, *, is_node: bool) -> tuple[Tensor, float]:
    """Clip the rows (world_size, numel), each in two parts, or as the shards of one; return them and rank 0's bytes."""
    rows, ranks = grads.clone(), SimulatedRanks(len(grads))

    def clip(comm: Comm) -> Reduction[float]:
        parts = [rows[comm.rank, :3], rows[comm.rank, 3:]]
        yield from clip_(parts, limit, within=comm if is_node else None, among=None if is_node else comm)
        return comm.traffic.num_bytes["counts"]

    return rows, ranks.carry_out([clip(comm) for comm in ranks.comms])[0]


@grid(world_size=[1, 2, 5], dtype=[torch.bfloat16, torch.float32, torch.float64], is_node=[False, True])
def test_all_ranks_scale_equally(world_size: int, dtype: torch.dtype, is_node: bool) -> None:
    """By the root mean square of their norms; by the norm of all where they are the shards of one gradient."""
    grads = torch.randn(world_size, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    grads[0] *= 50
    rows, sent = clipped(grads, 0.5, is_node=is_node)
    squares = grads.double().square().sum(1)
    norm = (squares.sum() if is_node else squares.mean()).sqrt()
    torch.testing.assert_close(rows.double(), grads.double() * 0.5 / norm, rtol=3 * torch.finfo(dtype).eps, atol=0)
    assert sent == 2 * 8 * (world_size - 1) / world_size
    assert torch.equal(clipped(grads, 2 * float(norm), is_node=is_node)[0], grads)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_rank_scales_where_one_is_not_finite(bad: float) -> None:
    grads = torch.ones(3, 10)
    grads[1, 4] = bad
    torch.testing.assert_close(clipped(grads, 0.5, is_node=False)[0], grads, rtol=0, atol=0, equal_nan=True)


@grid(scope=["bucket", "tensor", "model"], clip_norm=["rank", "global"])
def test_an_attachment_clips_the_whole_gradient(one_rank: None, scope: str, clip_norm: str) -> None:
    selector = micro.TopK() if scope == "tensor" else micro.Micro()
    model = wrapped()
    micro.attach(model, micro.SparseReducer(selector, density=1.0), scope=scope, clip=0.25, clip_norm=clip_norm)
    assert float(gradient(model, 0).norm()) == pytest.approx(0.25)
