"""micro.attach on a group of one rank, in the process of the test: what holds without any peer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.products import grid
from tests.refusals import NOTHING, refused
from tests.small_models import TwoHeads, batch, flat_gradient

pytestmark = pytest.mark.usefixtures("one_rank")

LR = 0.1


def wrapped(*, unused: bool = False) -> DistributedDataParallel:
    return DistributedDataParallel(TwoHeads(), bucket_cap_mb=1e-4, find_unused_parameters=unused)


def reducer(**settings: object) -> micro.SparseReducer:
    return micro.SparseReducer(micro.Micro(), density=0.2, **settings)  # type: ignore[arg-type]


def total_elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train(model: DistributedDataParallel, steps: range, *, both: bool = True) -> list[Tensor]:
    """Take SGD steps; return the gradients that were applied, one vector per step."""
    applied = []
    for step in steps:
        model.zero_grad()
        model(batch(step), both=both).square().mean().backward()
        applied.append(flat_gradient(model))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
    return applied


@grid(scope=["bucket", "tensor", "model"], clip=[None, 1e6])
def test_nothing_of_the_gradient_is_lost(scope: str, clip: float | None) -> None:
    model, plain = wrapped(), TwoHeads()
    attachment = micro.attach(model, reducer(), scope=scope, clip=clip)
    total = torch.zeros((), dtype=torch.float64)
    for step in range(4):
        plain.load_state_dict(model.module.state_dict())
        plain.zero_grad()
        plain(batch(step)).square().mean().backward()
        total = total + flat_gradient(plain).double().sum()
        (applied,) = train(model, range(step, step + 1))
        total = total - applied.double().sum()
    waiting = torch.cat(attachment.residuals()).double().sum()
    torch.testing.assert_close(waiting, total, rtol=1e-4, atol=1e-6)
    assert sum(stats.global_count for stats in attachment.stats) < total_elements(model)


def test_parameters_may_be_frozen_after_the_model_was_wrapped() -> None:
    """DDP goes on to reduce them, with gradients of zero: they count as unused."""
    model = wrapped(unused=True)
    model.module.body.weight.requires_grad_(False)
    with micro.attach(model, reducer()) as attachment:
        train(model, range(3))
        names = [name for names in attachment.bucket_names for name in names]
    assert sorted(names) == sorted(dict(model.module.named_parameters()))
    assert model.module.first.weight.grad is not None
    assert model.module.body.weight.grad is None


def weights_alone(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1


@grid(which=["only", "dense", "function"], scope=["bucket", "tensor", "model"])
def test_dense_parameters_get_the_mean_gradient_itself(which: str, scope: str) -> None:
    model, plain = wrapped(), TwoHeads()
    chosen = {
        "only": {"only": "*.weight"},
        "dense": {"dense": ["body.b*", "first.bias", "sec*.bias"]},
        "function": {"only": weights_alone},
    }
    attachment = micro.attach(model, reducer(), scope=scope, **chosen[which])  # type: ignore[arg-type]
    train(model, range(3))
    plain.load_state_dict(model.module.state_dict())
    train(model, range(3, 4))
    plain(batch(3)).square().mean().backward()
    for (name, ours), theirs in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad) == name.endswith("bias")
    assert sum(stats.dense_numel for stats in attachment.stats) == 12


def test_a_dense_start_trains_as_plain_ddp_does() -> None:
    model, plain = wrapped(), wrapped()
    attachment = micro.attach(model, reducer(), start_step=2)
    for step in range(3):
        ours, theirs = train(model, range(step, step + 1)), train(plain, range(step, step + 1))
        assert torch.equal(ours[0], theirs[0]) == (step < 2)
        assert sum(stats.dense_numel for stats in attachment.stats) == (total_elements(model) if step < 2 else 0)


@pytest.mark.parametrize(
    ("settings", "key", "given"),
    [
        ({"dense": "*norm*"}, "dense", "*norm*"),
        ({"only": "*.weight", "dense": ["first.*"]}, "both dense and only", "first.weight"),
        ({"dense": "*"}, "use reducer dense", NOTHING),
        ({"dense": lambda name, parameter: False}, "dense chooses none", NOTHING),
        ({"dense": []}, "dense chooses none", NOTHING),
        ({"only": 3}, "only", 3),
        ({"start_step": -1}, "start_step", -1),
    ],
)
def test_a_choice_that_does_not_fit_the_model_is_refused(settings: dict[str, Any], key: str, given: Any) -> None:
    model = wrapped()
    refused(lambda: micro.attach(model, reducer(), **settings), key, given)
    micro.attach(model, reducer())


@pytest.mark.parametrize("scope", ["bucket", "model"])
def test_a_restored_attachment_equals_the_uninterrupted_one_bit_for_bit(scope: str) -> None:
    model = wrapped()
    attachment = micro.attach(model, reducer(), scope=scope)
    train(model, range(3))
    weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    saved = attachment.state_dict()
    restored = wrapped()
    restored.module.load_state_dict(weights)
    second = micro.attach(restored, reducer(), scope=scope)
    with second.rehearsal():
        restored(batch(0)).square().mean().backward()
    second.load_state_dict(saved)
    for ours, theirs in zip(train(restored, range(3, 6)), train(model, range(3, 6)), strict=True):
        assert torch.equal(ours, theirs)


def test_a_gradient_with_nan_stops_the_step_and_training_can_resume() -> None:
    model = wrapped()
    attachment = micro.attach(model, reducer())
    train(model, range(2))
    with pytest.raises(micro.NonFiniteGradient):
        (model(batch(2)) * float("nan")).mean().backward()
    (applied,) = train(model, range(3, 4))
    assert torch.isfinite(applied).all()
    assert attachment.exposed_s >= 0


def test_a_parameter_that_no_rank_used_keeps_its_residual() -> None:
    model = wrapped(unused=True)
    attachment = micro.attach(model, reducer())
    train(model, range(2))
    before = [name for names in attachment.bucket_names for name in names]
    train(model, range(2, 4), both=False)
    assert sorted(before) == sorted(name for name, _ in model.module.named_parameters())
    assert sum(len(residual) for residual in attachment.residuals()) == total_elements(model)


@pytest.mark.parametrize(("name", "shape"), [("third.weight", (2, 8)), ("first.weight", (3, 8))])
def test_a_state_of_another_model_is_refused(name: str, shape: tuple[int, ...]) -> None:
    model = wrapped()
    attachment = micro.attach(model, reducer())
    train(model, range(1))
    saved = attachment.state_dict()
    saved["buckets"][0]["shapes"] = {name: shape}
    refused(lambda: attachment.load_state_dict(saved), name)


def test_what_cannot_be_attached_is_refused() -> None:
    plain: Any = TwoHeads()
    refused(lambda: micro.attach(plain, reducer()), "DistributedDataParallel", "TwoHeads")
    model = wrapped()
    micro.attach(model, reducer())
    refused(lambda: micro.attach(model, reducer()), "model has an attachment")
