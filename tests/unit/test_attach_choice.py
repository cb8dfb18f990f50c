"""Parameters that micro.attach reduces densely."""

from typing import Any

import pytest
import torch

import micro
from tests.products import grid
from tests.small_models import TwoHeads, given, gradient, gradients, wrapped

pytestmark = pytest.mark.usefixtures("one_rank")
TOPK, MICRO = (micro.SparseReducer(each, density=0.2) for each in (micro.TopK(), micro.Micro()))


CHOSEN: dict[str, dict[str, Any]] = {
    "only": {"only": "*.weight"},
    "dense": {"dense": ["body.b*", "first.bias", "sec*.bias"]},
    "function": {"only": lambda name, parameter: parameter.ndim > 1},
}


@grid(which=CHOSEN, scope=["bucket", "tensor", "model"])
def test_dense_parameters_get_the_mean_gradient_itself(which: str, scope: str) -> None:
    model, plain = wrapped(), TwoHeads()
    attachment = micro.attach(model, TOPK, scope=scope, **CHOSEN[which])
    for step in range(4):
        gradient(model, step)
        ours, theirs = gradients(model), given(plain, step)
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]) == name.endswith("bias")
    assert sum(stats.dense_numel for stats in attachment.stats) == 12


def test_a_dense_start_trains_as_plain_ddp_does() -> None:
    model, plain = wrapped(), wrapped()
    attachment = micro.attach(model, MICRO, start_step=2)
    for step in range(3):
        assert torch.equal(gradient(model, step), gradient(plain, step)) == (step < 2)
        assert sum(stats.dense_numel for stats in attachment.stats) == (92 if step < 2 else 0)
