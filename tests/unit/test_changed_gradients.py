"""Loops that take something away from an update after backward are told so, once; others are not."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.small_models import batch

pytestmark = pytest.mark.usefixtures("one_rank")
Change = Callable[[nn.Module], object]


def notes(change: Change, reducer: micro.Reducer | None = None) -> list[str]:
    """Return what is said in four steps in which ``change`` is called between backward and step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    attachment = micro.attach(model, reducer or micro.SparseReducer(micro.TopK(), density=0.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            change(model)
            optimizer.step()
    attachment.close()
    return [str(each.message) for each in caught]


def drop_last_layer(model: nn.Module) -> None:
    for parameter in list(model.parameters())[-2:]:
        parameter.grad = None


def test_an_update_that_is_clipped_after_backward_is_told_once_with_the_remedy() -> None:
    (said,) = notes(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    assert "clip= of micro.attach" in said


def test_gradients_that_are_removed_after_backward_are_named_once_with_the_remedy() -> None:
    (said,) = notes(drop_last_layer)
    assert "'2.weight'" in said
    assert "dense=" in said


def test_a_mean_that_keeps_nothing_may_be_clipped() -> None:
    assert notes(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), micro.DenseReducer()) == []


@pytest.mark.parametrize(
    "change",
    [lambda model: None, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e3)],
    ids=["nothing", "a limit that is never reached"],
)
def test_a_loop_that_takes_nothing_away_is_told_nothing(change: Change) -> None:
    assert notes(change) == []
