"""Activation checkpointing whose backward calls backward (use_reentrant=True), on a group of one rank."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import micro
from tests.small_models import flat_gradient

pytestmark = pytest.mark.usefixtures("one_rank")

NUM_BLOCKS = 3


class Blocks(nn.Module):
    """Blocks whose activations are computed again in backward, each in a backward of its own."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(NUM_BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return x


def wrapped(*, reentrant: bool) -> tuple[DistributedDataParallel, micro.Attachment]:
    model = DistributedDataParallel(Blocks(reentrant=reentrant), bucket_cap_mb=1e-5)
    return model, micro.attach(model, micro.SparseReducer(micro.TopK(), density=0.2))


def gradient(model: DistributedDataParallel, step: int, *, bad_block: int | None = None) -> Tensor:
    """Return the gradients of a step; one block adds NaN to its own."""
    model.zero_grad()
    handles = []
    if bad_block is not None:
        weight = model.module.blocks[bad_block][0].weight  # type: ignore[index, union-attr]
        handles.append(weight.register_hook(lambda grad: grad * float("nan")))  # type: ignore[union-attr, operator]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
    try:
        model(x).square().sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return flat_gradient(model)


def test_reentrant_checkpoints_give_the_updates_of_a_model_without_them() -> None:
    (reentrant, attachment), (plain, _) = wrapped(reentrant=True), wrapped(reentrant=False)
    for step in range(4):
        assert torch.equal(gradient(reentrant, step), gradient(plain, step))
    assert len(attachment.bucket_names) > 1, "one bucket: a test of nothing"
    assert attachment.exposed_s >= 0


@pytest.mark.parametrize("bad_block", range(NUM_BLOCKS))
def test_after_a_nan_in_any_block_the_model_can_be_trained_on(bad_block: int) -> None:
    model, _ = wrapped(reentrant=True)
    for step in range(2):
        gradient(model, step)
    for step in (2, 4):
        with pytest.raises(micro.NonFiniteGradient, match=rf"'blocks\.{bad_block}\.0\.weight'"):
            gradient(model, step, bad_block=bad_block)
        assert gradient(model, step + 1).isfinite().all()
