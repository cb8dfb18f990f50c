"""A GradScaler beside an attachment, on a group of one rank in the process of the test."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.selectors.scaled_elements import ScaledElements
from micro.zoo.accordion import Accordion
from tests.products import grid
from tests.small_models import batch

pytestmark = pytest.mark.usefixtures("one_rank")

LR = 0.05


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), bucket_cap_mb=1e-4)


def reducer(feedback: micro.Feedback | None = None) -> micro.SparseReducer:
    return micro.SparseReducer(micro.TopK(), density=0.2, feedback=feedback or micro.ErrorFeedback())


def scaler_at(scale: float, growth_interval: int = 2000) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


def flat(tensors: Iterator[Tensor] | list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def step_of(model: DistributedDataParallel, scaler: torch.amp.GradScaler, step: int, *, factor: float = 1.0) -> Tensor:
    """Take a step; return the weights after it. A factor of 1e38 overflows with the scale."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    optimizer.zero_grad()
    scaler.scale(model(batch(step)).square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    return flat(list(model.parameters())).clone()


@pytest.mark.parametrize(
    "method",
    [
        reducer(),
        reducer(micro.MomentumCorrection()),
        micro.SparseReducer(micro.Scaled(selector=micro.TopK()), density=0.2),
        micro.SparseReducer(ScaledElements(selector=micro.TopK(), eps=1e-30, memory=0.5), density=0.2),
        micro.SparseReducer(micro.TopK(scope="layer"), Accordion(density=0.1, high=0.5, interval=1, change=0.9)),
        micro.Split(reducer=micro.SparseReducer(micro.Scaled(selector=micro.TopK()), density=0.2), dense=("0.bias",)),
    ],
    ids=lambda method: method.method,
)
def test_a_scale_that_changes_changes_no_bit_of_the_training(method: micro.Reducer) -> None:
    """Powers of two are exact: a run whose scale grows and falls equals one without a scaler."""
    plain, scaled = wrapped(), wrapped()
    growing, none = scaler_at(2.0**8, growth_interval=2), torch.amp.GradScaler("cpu", enabled=False)
    with (
        micro.attach(plain, method, scaler=none),
        micro.attach(scaled, method, scaler=growing) as attachment,
    ):
        for step in range(20):
            assert torch.equal(step_of(plain, none, step), step_of(scaled, growing, step)), step
            assert not attachment.skipped
        assert growing.get_scale() > 2.0**8


@grid(policy=["stop", "skip"], scope=["bucket", "model"])
def test_an_overflow_lowers_the_scale_and_loses_nothing_that_is_kept(policy: str, scope: str) -> None:
    model, scaler = wrapped(), scaler_at(2.0**16)
    method = micro.SparseReducer(micro.TopK(), density=0.2, nonfinite=policy)  # type: ignore[arg-type]
    with micro.attach(model, method, scope=scope, scaler=scaler) as attachment:
        for step in range(3):
            step_of(model, scaler, step)
        before = flat(list(model.parameters())).clone()
        kept = flat(attachment.residuals()).clone() / scaler.get_scale()
        assert torch.equal(step_of(model, scaler, 3, factor=float("inf")), before)
        assert attachment.skipped
        assert all(stats.skipped for stats in attachment.stats)
        assert all(p.grad is not None and not p.grad.isfinite().any() for p in model.parameters())
        assert scaler.get_scale() == 2.0**15
        assert torch.equal(flat(attachment.residuals()) / 2.0**16, kept), "nothing finite came with that gradient"
        after = step_of(model, scaler, 4)
        assert not attachment.skipped
        assert after.isfinite().all()
        assert not torch.equal(after, before)


def test_what_is_kept_follows_the_scale_in_true_units() -> None:
    model, scaler = wrapped(), scaler_at(2.0**10)
    with micro.attach(model, reducer(), scaler=scaler) as attachment:
        for step in range(3):
            step_of(model, scaler, step)
        kept = {name: piece.clone() for name, piece in pieces(attachment).items()}
        scaler.update(2.0**7)
        model.zero_grad()
        (model(batch(0)) * 0.0).sum().backward()  # sends of what is kept alone
        sent = {name: p.grad for name, p in model.module.named_parameters()}
        for name, piece in pieces(attachment).items():
            assert torch.equal(piece + sent[name].flatten(), kept[name] / 8), name  # type: ignore[union-attr]


def pieces(attachment: micro.Attachment) -> dict[str, Tensor]:
    saved = attachment.state_dict()["buckets"]
    return {name: piece for bucket in saved for name, piece in bucket["memory"]["residual"].items()}


@pytest.mark.parametrize("later", [2.0**10, 2.0**6])
def test_a_restored_run_goes_on_bit_for_bit_at_whatever_scale(later: float) -> None:
    first, second = wrapped(), wrapped()
    scaler, other = scaler_at(2.0**10), scaler_at(later)
    with micro.attach(first, reducer(), scaler=scaler) as one, micro.attach(second, reducer(), scaler=other) as two:
        for step in range(3):
            step_of(first, scaler, step)
        second.module.load_state_dict(first.module.state_dict())
        two.load_state_dict(one.state_dict())
        for step in range(3, 6):
            assert torch.equal(step_of(first, scaler, step), step_of(second, other, step))


def test_clip_is_in_units_of_unscaled_gradients() -> None:
    plain, scaled = wrapped(), wrapped()
    none, scaler = torch.amp.GradScaler("cpu", enabled=False), scaler_at(2.0**12)
    with micro.attach(plain, reducer(), clip=0.01), micro.attach(scaled, reducer(), clip=0.01, scaler=scaler):
        for step in range(3):
            torch.testing.assert_close(step_of(plain, none, step), step_of(scaled, scaler, step))


@pytest.mark.parametrize(
    ("scaler", "method", "key"),
    [
        (2.0, reducer(), "GradScaler"),
        (scaler_at(2.0), reducer(micro.MomentumCorrection(clip=1.0)), "momentum"),
        (scaler_at(2.0), micro.SparseReducer(micro.Threshold(), 0.1), "threshold"),
    ],
    ids=["no scaler", "clip", "threshold"],
)
def test_what_a_scaler_does_not_go_with_is_refused(scaler: object, method: micro.Reducer, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        micro.attach(wrapped(), method, scaler=scaler)  # type: ignore[arg-type]
