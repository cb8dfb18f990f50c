"""Gradients that are not finite, on a group of one rank in the process of the test."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.small_models import batch

pytestmark = pytest.mark.usefixtures("one_rank")

NAN = float("nan")


@pytest.fixture
def closed(one_rank: None) -> Iterator[ExitStack]:
    """Return a stack whose contexts end with the test."""
    with ExitStack() as stack:
        yield stack


def wrapped(seed: int = 0) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), bucket_cap_mb=1e-4)


@pytest.mark.parametrize("later", [(1.0, NAN), (NAN, 1.0)])
def test_a_nan_of_one_of_two_models_is_never_lost(later: tuple[float, float], closed: ExitStack) -> None:
    first, second = wrapped(1), wrapped(2)
    for model in (first, second):
        closed.enter_context(micro.attach(model, micro.SparseReducer(micro.Micro(), 0.2)))

    def backward(step: int, factors: tuple[float, float]) -> None:
        losses = [model(batch(step)).square().mean() for model in (first, second)]
        (losses[0] * factors[0] + losses[1] * factors[1]).backward()

    backward(0, (1.0, 1.0))
    with pytest.raises(micro.NonFiniteGradient):
        backward(1, (NAN, NAN))  # autograd raises one error and drops what the other model had queued
    for step in (2, 4):
        with pytest.raises(micro.NonFiniteGradient, match=f"at step {step}"):
            backward(step, later)
        backward(step + 1, (1.0, 1.0))

    with pytest.raises(micro.NonFiniteGradient):
        ((first(batch(6)) + second(batch(6))) * NAN).mean().backward()
    (first(batch(7)) + second(batch(7))).mean().backward()  # what was raised once is not raised again


class Heads(nn.Module):
    """A body and three heads, of which a forward uses some, and one parameter of which the loss takes a NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, inputs: Tensor, used: tuple[int, ...] = (0, 1, 2), bad: int | None = None) -> Tensor:
        hidden = self.body(inputs).relu()
        loss = sum((head(hidden).square().mean() for i, head in enumerate(self.heads) if i in used), torch.zeros(()))
        return loss if bad is None else loss + self.heads[bad].bias.sum() * NAN


def flat_gradients(model: nn.Module) -> Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


def kept_by_name(attachment: micro.Attachment) -> dict[str, Tensor]:
    buckets = attachment.state_dict()["buckets"]
    return {name: piece for bucket in buckets for name, piece in bucket["memory"]["residual"].items()}


SCOPES = [("bucket", None), ("tensor", None), ("model", None), ("bucket", 1e6)]


@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize(("scope", "clip"), SCOPES)
def test_a_nan_in_one_bucket_leaves_all_residuals_as_if_nothing_was_sent(
    scope: str, clip: float | None, policy: str, closed: ExitStack
) -> None:
    used = (0, 2)
    model = DistributedDataParallel(Heads(), bucket_cap_mb=1e-4, find_unused_parameters=True)
    reducer = micro.SparseReducer(micro.TopK(), density=0.2, nonfinite=policy)  # type: ignore[arg-type]
    attachment = closed.enter_context(micro.attach(model, reducer, scope=scope, clip=clip))
    for step in range(3):
        model.zero_grad()
        model(batch(step)).backward()
    assert not attachment.skipped
    before, plain = kept_by_name(attachment), Heads()
    plain.load_state_dict(model.module.state_dict())
    plain(batch(3), used).backward()
    model.zero_grad()
    if policy == "stop":
        with pytest.raises(micro.NonFiniteGradient, match=r"'heads.2.bias' on rank 0 is not finite at step 3"):
            model(batch(3), used, bad=2).backward()
    else:
        model(batch(3), used, bad=2).backward()
    assert attachment.skipped
    assert all(stats.skipped for stats in attachment.stats)
    assert not flat_gradients(model).any()
    after = kept_by_name(attachment)
    for name, parameter in plain.named_parameters():
        gradient = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad
        if name == "heads.2.bias":
            gradient = torch.zeros(parameter.shape)
        assert torch.equal(after[name], before[name] + gradient.flatten()), name
    model.zero_grad()
    model(batch(4)).backward()
    assert not attachment.skipped
    assert flat_gradients(model).any()
