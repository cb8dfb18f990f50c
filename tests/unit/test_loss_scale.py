"""A GradScaler with an attachment, on a group of one rank in this process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import micro
from micro.selectors.scaled_elements import ScaledElements
from tests.products import grid
from tests.sharded_models import attached_by
from tests.small_models import backward, batch, chain, gradients, kept, local, wrapped

pytestmark = pytest.mark.usefixtures("one_rank")


def sparse(selector: Any = None, density: Any = 0.2, **parts: Any) -> micro.SparseReducer:
    return micro.SparseReducer(selector or micro.TopK(), density, **parts)


def scaler_at(scale: float | None, growth_interval: int = 2000) -> torch.amp.GradScaler:
    """Return a scaler; with None, one that is switched off."""
    settings = {"init_scale": scale, "growth_interval": growth_interval} if scale else {"enabled": False}
    return torch.amp.GradScaler("cpu", **settings)


def step_of(model: nn.Module, scaler: Any, step: int, *, factor: float = 1.0) -> Tensor:
    """Take a step; return the weights after it. A factor of infinity overflows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    optimizer.zero_grad()
    scaler.scale(model(batch(step)).square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    return torch.cat([local(p.detach()).flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "driver"),
    [
        (sparse(), "ddp"),
        (sparse(), "fsdp"),
        (sparse(feedback=micro.MomentumCorrection()), "ddp"),
        (sparse(ScaledElements(selector=micro.TopK(), eps=1e-30, memory=0.5)), "ddp"),
        (micro.Split(reducer=sparse(ScaledElements(selector=micro.TopK(), eps=1e-30)), dense=("0.bias",)), "ddp"),
    ],
    ids=lambda given: getattr(given, "method", given),
)
def test_a_scale_that_changes_changes_no_bit_of_the_training(method: micro.Reducer, driver: str) -> None:
    """Powers of two are exact: a run whose scale grows and falls equals one without a scaler."""
    none, growing = scaler_at(None), scaler_at(2.0**8, 2)
    plain, other = attached_by(driver, method, chain(), scaler=none)
    scaled, attached = attached_by(driver, method, chain(), scaler=growing)
    with other, attached as attachment:
        for step in range(20):
            assert torch.equal(step_of(plain, none, step), step_of(scaled, growing, step)), step
            assert not attachment.skipped
        assert growing.get_scale() > 2.0**8


@grid(policy=["stop", "skip"], driver=["ddp", "fsdp"], scope=["bucket", "model"])
def test_an_overflow_lowers_the_scale_and_loses_nothing_that_is_kept(policy: str, driver: str, scope: str) -> None:
    scaler = scaler_at(2.0**16)
    model, attached = attached_by(driver, sparse(nonfinite=policy), chain(), scope=scope, scaler=scaler)
    with attached as attachment:
        for step in range(3):
            before = step_of(model, scaler, step)
        waiting = kept(attachment)
        assert torch.equal(step_of(model, scaler, 3, factor=float("inf")), before)
        assert attachment.skipped
        assert all(stats.skipped for stats in attachment.stats)
        assert not any(gradient.isfinite().any() for gradient in gradients(model).values())
        assert scaler.get_scale() == 2.0**15
        assert all(torch.equal(piece, waiting[name]) for name, piece in kept(attachment).items()), "nothing came"
        after = step_of(model, scaler, 4)
        assert not attachment.skipped
        assert after.isfinite().all()
        assert not torch.equal(after, before)


@pytest.mark.parametrize("later", [2.0**10, 2.0**6])
def test_a_restored_run_continues_bit_for_bit_at_any_scale(later: float) -> None:
    first, second, scaler, other = wrapped(chain()), wrapped(chain()), scaler_at(2.0**10), scaler_at(later)
    with micro.attach(first, sparse(), scaler=scaler) as one, micro.attach(second, sparse(), scaler=other) as two:
        for step in range(3):
            step_of(first, scaler, step)
        second.load_state_dict(first.state_dict())
        two.load_state_dict(one.state_dict())
        for step in range(3, 6):
            assert torch.equal(step_of(first, scaler, step), step_of(second, other, step))


def test_a_run_continues_without_the_scaler_that_it_was_saved_with() -> None:
    first, second, none = wrapped(chain()), wrapped(chain()), scaler_at(None)
    with micro.attach(first, sparse(), scaler=scaler_at(2.0**10)) as one, micro.attach(second, sparse()) as two:
        step_of(first, scaler_at(2.0**10), 0)
        second.load_state_dict(first.state_dict())
        two.load_state_dict(one.state_dict())
        assert all(torch.equal(2.0**10 * piece, kept(one)[name]) for name, piece in kept(two).items())
        step_of(second, none, 1)
        two.load_state_dict(two.state_dict())


class OwnScaler:
    """A loss scaler as programs have them that know no GradScaler: it halves where a gradient is not finite."""

    def __init__(self, scale: float) -> None:
        self.value = scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not all(bool(grad.isfinite().all()) for grad in grads):
            self.value /= 2
            return
        for grad in grads:
            grad.div_(self.value)
        optimizer.step()
        self.value *= 2

    def update(self) -> None:
        """Do nothing: the step has."""


@pytest.mark.parametrize("driver", ["ddp", "fsdp"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_scaler_of_the_programs_own_is_given_as_a_function_that_returns_the_scale(driver: str, policy: str) -> None:
    none, own = scaler_at(None), OwnScaler(2.0**4)
    plain, other = attached_by(driver, sparse(), chain(), scaler=none)
    scaled, attached = attached_by(driver, sparse(nonfinite=policy), chain(), scaler=lambda: own.value)
    with other, attached as attachment:
        for step in range(6):
            before = step_of(plain, none, step)
            assert torch.equal(before, step_of(scaled, own, step)), step
        assert own.value == 2.0**10
        assert torch.equal(step_of(scaled, own, 6, factor=float("inf")), before)
        assert own.value == 2.0**9, "it saw the overflow"
        assert attachment.skipped
        assert torch.equal(step_of(plain, none, 7), step_of(scaled, own, 7))


def test_a_wrapper_of_a_gradscaler_is_that_scaler() -> None:
    scaler = scaler_at(2.0**8)
    model = wrapped(chain())
    with micro.attach(model, sparse(), scaler=SimpleNamespace(_scaler=scaler)) as attachment:
        before = step_of(model, scaler, 0)
        assert torch.equal(step_of(model, scaler, 1, factor=float("inf")), before)
        assert (scaler.get_scale(), attachment.state_dict()["loss_scale"]) == (2.0**7, 2.0**8)
    with (
        micro.attach(model, sparse(), scaler=SimpleNamespace(_scaler=scaler_at(None))),
        pytest.raises(micro.NonFiniteGradient, match="scaler="),
    ):
        step_of(model, scaler_at(None), 2, factor=float("inf"))


@pytest.mark.parametrize("later", [0.0, float("inf"), float("nan"), None])
def test_a_scale_that_is_no_positive_number_any_more_is_named_out_of_backward(later: Any) -> None:
    scales, model = [4.0, 4.0, later], wrapped(chain())
    with micro.attach(model, sparse(), scaler=lambda: scales.pop(0)):
        backward(model, 0)
        with pytest.raises(ValueError, match="scale"):
            backward(model, 1)


@pytest.mark.parametrize("driver", ["ddp", "fsdp"])
def test_a_hundred_skipped_steps_in_a_row_are_an_error_that_names_the_scaler(driver: str) -> None:
    """As under a scaler that the library does not know: it sees zeros, raises its scale, and nothing is trained."""
    model, attached = attached_by(driver, sparse(nonfinite="skip"), chain())

    def step(factor: float) -> None:
        model.zero_grad()
        backward(model, 0, factor=factor)

    with attached as attachment:
        for _ in range(99):
            step(float("inf"))
        step(1.0)
        assert not attachment.skipped
        for _ in range(99):
            step(float("inf"))
        with pytest.raises(micro.NonFiniteGradient, match=r"100 steps.*scaler="):
            step(float("inf"))
        assert not any(gradient.any() for gradient in gradients(model).values())
        step(1.0)
        assert not attachment.skipped


def test_clip_is_in_units_of_unscaled_gradients() -> None:
    plain, scaled, none, scaler = wrapped(chain()), wrapped(chain()), scaler_at(None), scaler_at(2.0**12)
    with micro.attach(plain, sparse(), clip=0.01), micro.attach(scaled, sparse(), clip=0.01, scaler=scaler):
        for step in range(3):
            torch.testing.assert_close(step_of(plain, none, step), step_of(scaled, scaler, step))
