"""What the host knows of a mean that was written: whether it counts, from one read of an accelerator."""

import math

import pytest
import torch
from torch import Tensor

from micro import Layout
from micro.reducers.outcome import checked
from tests.fake_device import DeviceTensor, fake_device


@pytest.mark.parametrize(
    ("update", "is_finite", "found"),
    [
        (1.0, True, []),
        (3e38, True, []),  # of which the sum overflows, the elements do not
        (math.inf, True, [(None, 2)]),
        (1.0, False, [(3, None)]),
        (math.nan, False, [(3, None)]),
    ],
)
def test_what_is_not_finite_is_found(
    update: float, is_finite: bool, found: list[tuple[int | None, int | None]]
) -> None:
    made = checked(torch.tensor([3e38, 1.0, update, 1.0]), torch.tensor(0.5), None, is_finite=is_finite, num_updated=3)
    findings = made.findings(Layout.flat(4), None if is_finite else 3)
    assert [(one.in_gradient, one.in_update) for one in findings] == found
    assert (made.num_updated, made.records) == (3, [0.5, None])


def test_an_accelerator_is_read_once() -> None:
    def number(x: float) -> Tensor:
        return DeviceTensor(torch.tensor(x))

    with fake_device() as waits:
        flag, grad = number(1.0) > 0, DeviceTensor(torch.ones(4))
        made = checked(grad, number(0.5), is_finite=flag, num_updated=number(3.0))
        assert waits.seen.total() == 1
    assert (made.is_finite, made.num_updated, made.records) == (True, 3, [0.5])
