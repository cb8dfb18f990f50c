"""A mean that was written before the host knew whether it counts: what is undone, what is cut, what is reported."""

import math

import pytest
import torch
from torch import Tensor

from micro import Layout
from micro.reducers.applied import applied
from tests.fake_device import DeviceTensor, fake_device

LAYOUT = Layout.flat(4)


@pytest.mark.parametrize(
    ("update", "is_finite", "calls", "found"),
    [
        (1.0, True, [], []),
        (3e38, True, [], []),  # of which the sum overflows, the elements do not
        (math.inf, True, ["undo", "cut"], [(None, 2)]),
        (1.0, False, ["undo"], [(3, None)]),
        (math.nan, False, ["undo"], [(3, None)]),
    ],
)
def test_what_does_not_count_is_undone(
    update: float, is_finite: bool, calls: list[str], found: list[tuple[int | None, int | None]]
) -> None:
    grad, called = torch.tensor([3e38, 1.0, update, 1.0]), []
    made = applied(
        grad,
        lambda: called.append("undo"),
        torch.tensor(0.5),
        None,
        is_finite=is_finite,
        num_updated=3,
        cut_=lambda: called.append("cut"),
    )
    assert called == calls
    findings = made.findings(LAYOUT, None if is_finite else 3)
    assert [(one.in_gradient, one.in_update) for one in findings] == found
    assert (made.num_updated, made.records) == (3, [0.5, None])
    made.undo()
    assert called == (calls or ["undo"])  # a second time it would undo too much


def test_an_accelerator_is_read_once() -> None:
    def number(x: float) -> Tensor:
        return DeviceTensor(torch.tensor(x))

    with fake_device() as waits:
        flag = number(1.0) > 0
        grad = DeviceTensor(torch.ones(4))
        made = applied(grad, list, number(0.5), is_finite=flag, num_updated=number(3.0), cut_=list)
        assert waits.seen.total() == 1
    assert (made.is_finite, made.num_updated, made.records) == (True, 3, [0.5])
