"""On tensors that say they are on a CUDA device, no method mixes devices or waits more often than is published."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from micro import kernels
from tests.fake_device import DEVICE, DeviceTensor, fake_device
from tests.host_waits import METHODS, published, totals, waits_of


@pytest.mark.parametrize("method", METHODS)
def test_no_method_waits_more_often_than_published(method: str) -> None:
    waits = waits_of(method)
    allowed = published()[method]
    more = [kind for kind, now, then in zip(("reads", "writes"), totals(waits), allowed, strict=True) if now > then]
    assert not more, f"more {more} than {allowed}: {dict(waits)}; if that is right, run python -m tests.host_waits"


@pytest.mark.parametrize(
    ("operation", "reads"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x.unique(), 1),
        (lambda x: torch.bincount(x.to(torch.int32).abs()), 2),
        (lambda x: torch.arange(5, device=DEVICE).repeat_interleave(x.to(torch.int64).abs()), 1),
        (lambda x: x.masked_fill_(x > 0, 2.0), 0),
        (lambda x: x.add_(torch.tensor(1.0)), 0),
        (lambda x: torch.zeros(3, device=DEVICE), 0),
    ],
)
def test_reads_are_counted(operation: Callable[[Tensor], object], reads: int) -> None:
    with fake_device() as waits:
        operation(DeviceTensor(torch.arange(5.0)))
    assert totals(waits.seen) == (reads, 0)


def test_writes_are_counted() -> None:
    with fake_device() as waits:
        torch.tensor([1, 2], device=DEVICE)
        torch.ones(2).to(DEVICE)
        torch.ones(2).to(DEVICE, non_blocking=True)
    assert totals(waits.seen) == (0, 2)


def test_a_wait_is_of_the_function_that_it_is_in() -> None:
    with fake_device() as waits:
        kernels.above(DeviceTensor(torch.arange(5.0)), 2.0)
    assert dict(waits.seen) == {("read", "above"): 1}


@pytest.mark.parametrize("mix", [lambda x: x + torch.ones(5), lambda x: torch.cat([x, torch.ones(5)])])
def test_devices_are_not_mixed(mix: Callable[[Tensor], Tensor]) -> None:
    with fake_device(), pytest.raises(RuntimeError, match="of the device and of the host"):
        mix(DeviceTensor(torch.arange(5.0)))


def test_results_are_of_the_device_and_share_memory() -> None:
    values = torch.arange(5.0)
    with fake_device():
        x = DeviceTensor(values)
        x[1:3].mul_(10)
        assert (x + 1).device == DEVICE
        assert x.cpu().device == torch.device("cpu")
    assert values.tolist() == [0.0, 10.0, 20.0, 3.0, 4.0]
