"""Clipping a gradient before it is reduced: each rank's own norm, or one norm for all."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.clipping import clip_, clip_together_
from micro.comm import Comm
from micro.lockstep import SimulatedRanks
from micro.requests import Reduction
from tests.products import grid
from tests.small_models import flat_gradient


@grid(dtype=[torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_do_not_overflow_where_elements_do_not(dtype: torch.dtype) -> None:
    """Half precision has no norm above 65,504, single precision none of elements above 1e19."""
    size = 3e4 if dtype.itemsize == 2 else 3e30
    parts = [torch.full((40,), size, dtype=dtype), torch.full((60,), -size, dtype=dtype)]
    clip_(parts, 1.0)
    assert math.hypot(*torch.cat(parts).double().tolist()) == pytest.approx(1.0, rel=1e-2)


def test_parts_of_several_dtypes_have_one_norm() -> None:
    parts = [torch.full((3,), 4.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    clip_(parts, 6.0)
    assert torch.cat(parts).tolist() == pytest.approx([2.0] * 9)


def clipped_together(grads: Tensor, limit: float) -> tuple[Tensor, float]:
    """Clip the rows (world_size, numel), each in two parts; return them and the bytes that rank 0 sent."""
    rows, ranks = grads.clone(), SimulatedRanks(len(grads))

    def clip(comm: Comm) -> Reduction[float]:
        yield from clip_together_([rows[comm.rank, :3], rows[comm.rank, 3:]], limit, comm)
        return comm.traffic.num_bytes["counts"]

    return rows, ranks.carry_out([clip(comm) for comm in ranks.comms])[0]


@grid(world_size=[1, 2, 5], dtype=[torch.bfloat16, torch.float32, torch.float64])
def test_all_ranks_scale_alike_by_the_root_mean_square_of_their_norms(world_size: int, dtype: torch.dtype) -> None:
    grads = torch.randn(world_size, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    grads[0] *= 50
    rows, sent = clipped_together(grads, 0.5)
    norm = grads.double().square().sum(1).mean().sqrt()
    torch.testing.assert_close(rows.double(), grads.double() * 0.5 / norm, rtol=3 * torch.finfo(dtype).eps, atol=0)
    assert rows.double().mean(0).norm() <= 0.5 * (1 + 3 * torch.finfo(dtype).eps)
    assert sent == 2 * 8 * (world_size - 1) / world_size
    untouched, _ = clipped_together(grads, 2 * float(norm))
    assert torch.equal(untouched, grads)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_rank_scales_where_one_is_not_finite(bad: float) -> None:
    grads = torch.ones(3, 10)
    grads[1, 4] = bad
    rows, _ = clipped_together(grads, 0.5)
    torch.testing.assert_close(rows, grads, rtol=0, atol=0, equal_nan=True)


@grid(scope=["bucket", "tensor", "model"], clip_norm=["rank", "global"])
def test_an_attachment_clips_the_whole_gradient(one_rank: None, scope: str, clip_norm: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), bucket_cap_mb=1e-4)
    everything = micro.SparseReducer(micro.Micro(), density=1.0)
    micro.attach(model, everything, scope=scope, clip=0.25, clip_norm=clip_norm)
    model(torch.ones(3, 6)).sum().backward()
    whole = flat_gradient(model)
    assert float(whole.norm()) == pytest.approx(0.25)


def test_what_is_no_norm_is_refused(one_rank: None) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    reducer = micro.SparseReducer(micro.Micro(), density=0.5)
    with pytest.raises(ValueError, match="clip_norm must be one of rank, global, got 'all'"):
        micro.attach(model, reducer, clip=1.0, clip_norm="all")
    with pytest.raises(ValueError, match="clip_norm=global needs a clip: set it, or leave clip_norm out"):
        micro.attach(model, reducer, clip_norm="global")
