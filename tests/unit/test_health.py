"""Gradients that are not finite, on a group of one rank in the process of the test."""

from contextlib import nullcontext
from typing import Literal

import pytest
import torch

import micro
from tests.products import grid
from tests.sharded_models import attached_by
from tests.small_models import TwoHeads, assert_same, batch, chain, given, gradient, gradients, kept, total, wrapped

pytestmark = pytest.mark.usefixtures("one_rank")
NAN = float("nan")


@grid(driver=["ddp", "fsdp"], later=[(1.0, NAN), (NAN, 1.0)])
def test_a_nan_of_one_of_two_models_is_never_lost(driver: str, later: tuple[float, float]) -> None:
    reducer = micro.SparseReducer(micro.Micro(), 0.2)
    (first, one), (second, other) = (attached_by(driver, reducer, chain()) for _ in range(2))

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
    one.close()
    other.close()


@grid(case=[("bucket", None), ("tensor", None), ("model", None), ("bucket", 1e6)], policy=["skip", "stop"])
def test_a_nan_in_one_bucket_leaves_all_residuals_as_if_nothing_was_sent(
    case: tuple[str, float | None], policy: Literal["skip", "stop"]
) -> None:
    """Of a parameter that is not used they take nothing, of the one with the NaN neither."""
    scope, clip = case
    model = wrapped(find_unused_parameters=True)
    reducer = micro.SparseReducer(micro.TopK(), density=0.2, nonfinite=policy)
    with micro.attach(model, reducer, scope=scope, clip=clip) as attachment:
        for step in range(3):
            assert gradient(model, step).any()
        assert not attachment.skipped
        expected = given(TwoHeads(), 3, both=False) | {"first.bias": torch.zeros(2)}
        expected = total(kept(attachment), expected)
        handle = model.module.first.bias.register_hook(lambda grad: grad * NAN)
        stops = pytest.raises(micro.NonFiniteGradient, match=r"'first.bias' on rank 0 is not finite at step 3")
        with stops if policy == "stop" else nullcontext():
            gradient(model, 3, both=False)
        handle.remove()
        assert attachment.skipped
        assert all(stats.skipped for stats in attachment.stats)
        assert not any(grad.any() for grad in gradients(model).values())
        assert_same(kept(attachment), expected, rtol=0, atol=0)
        assert gradient(model, 4).any()
        assert not attachment.skipped
