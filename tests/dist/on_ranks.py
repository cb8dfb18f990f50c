"""Tests whose body runs on every rank of a shared group at once: what they compare between ranks they gather."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.processes import ranks


def on_ranks(world_size: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test's body run on so many ranks; without a number, on as many as its argument ``world_size`` says.

    The test fails where the body does on any rank. Its arguments travel to the processes.
    """

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*given: Any, **arguments: Any) -> None:
            if dist.is_initialized():  # this is a rank
                body(*given, **arguments)
            else:
                ranks(world_size or arguments["world_size"]).run(_call, test, arguments)

        return test

    return decorated


def _call(test: Callable[..., None], arguments: dict[str, Any]) -> None:
    test(**arguments)


def of_all(value: Any) -> list[Any]:
    """Return what every rank has, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def the_same(value: Any) -> Any:
    """Return a value, after a check that all ranks have it, tensors bit for bit."""
    for other in of_all(value):
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    return value
