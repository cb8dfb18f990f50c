"""Clipping among real ranks whose gradients differ in size, by one norm of all."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.dist.ddp_steps import DENSE, TINY_MB, Losses, Net, build, ddp_gradients, local_gradients, one_loss
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
LIMIT = 0.1


def of_different_sizes(model: torch.nn.Module, step: int) -> list[Tensor]:
    """Return the loss of a step, larger on rank 1."""
    return [loss * 10.0 ** dist.get_rank() for loss in one_loss(model, step)]


def clipped() -> tuple[Tensor, Tensor, float]:
    """Return all ranks' gradients (world_size, numel), the update (numel,), and the bytes of the clipping."""
    losses: Losses = of_different_sizes  # type: ignore[assignment]
    mine = torch.cat([gradient.flatten() for gradient in local_gradients(build(Net), losses, 0).values()])
    rows = mine.new_empty(dist.get_world_size(), mine.numel())
    dist.all_gather_into_tensor(rows.view(-1), mine)
    model = DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB)
    with micro.attach(model, DENSE, clip=LIMIT, clip_norm="global") as attachment:
        update = ddp_gradients(model, losses, 0)
        counts_bytes = sum(stats.counts_bytes for stats in attachment.stats)
    return rows, torch.cat([gradient.flatten() for gradient in update.values()]), counts_bytes


def test_all_ranks_clip_by_the_root_mean_square_of_their_norms() -> None:
    """The mean keeps its direction, and its norm is at most the limit: not the limit, as where it were known."""
    for rows, update, counts_bytes in ranks(2).run(clipped):
        norm = rows.square().sum(1).mean().sqrt()
        torch.testing.assert_close(update, rows.mean(0) * LIMIT / norm)
        assert float(update.norm()) <= LIMIT
        assert counts_bytes == 8, "one number all-reduced: 16 (n - 1) / n bytes"
