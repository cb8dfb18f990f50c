"""Check that a GPU runs the kernels, with the same results as torch."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from micro.kernels import reference
from micro.kernels.triton import absorbing, scanning, summing
from micro.values.finite import index_of

OLDEST = (8, 0)  # compute capability for which the kernels are compiled in the tests
NUMEL = 300_001  # more programs of a kernel than run at once; one less is a multiple of 16


def check(device: torch.device) -> None:
    """Run each kernel that methods use on ``device``, and compare it with torch. The host waits a few times.

    Raises:
        RuntimeError: the GPU is too old, or a kernel's result is not torch's.
        Exception: whatever Triton, the driver or the C compiler raise.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        raise RuntimeError(f"compute capability must be at least {OLDEST}, got {capability}")
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).to(device)
    for vector in (x, x[:-1], x[1:]):  # lengths and addresses that are multiples of 16, or not: compiled one by one
        _check_kernels(vector)


def _check_kernels(x: Tensor) -> None:
    """Compare what kernels make of ``x`` (numel,) with what torch does."""
    grad = x.flip(0)
    grad[x.numel() // 2] = math.nan
    for module, name, *given in (
        (absorbing, "absorb_", x.flip(0), x),
        (absorbing, "absorb_", x, grad),
        (scanning, "above", x, 2.0),
        (scanning, "largest", x, 999),
        (summing, "sums", x, 1.0),
        (summing, "absorb_and_sum_", x, grad),
    ):
        ours, theirs = (_outcome(getattr(each, name), given) for each in (module, reference))
        if not all(_agree(*pair) for pair in zip(ours, theirs, strict=True)):
            raise RuntimeError(f"{name} gives another result than torch")


def _outcome(function: Any, given: Sequence[Any]) -> list[Any]:
    """Return what a function returns, its parts one after the other, then its vectors as it leaves them."""
    changes = function.__name__.endswith("_")
    vectors = [_copy(value) if changes and isinstance(value, Tensor) else value for value in given]
    result = function(*vectors)
    parts: Iterable[Any] = result if isinstance(result, tuple) else [result]
    if function.__name__.startswith("absorb"):
        first_bad, *sums = parts
        parts = [index_of(first_bad, given[0].numel()), *sums]
    return [*parts, *(value for value in vectors if isinstance(value, Tensor))]


def _copy(x: Tensor) -> Tensor:
    """Return a copy whose address is as far from a multiple of 16."""
    return torch.nn.functional.pad(x, (int(x.storage_offset()), 0))[x.storage_offset() :]


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return are_near(one, other) if isinstance(one, list) else bool(one == other)


def are_near(found: Sequence[float], expected: Sequence[float]) -> bool:
    """Return whether the numbers of `Sums` differ by rounding alone."""
    squares, magnitudes = expected[2:4]
    rounding = (0.0, magnitudes, squares, magnitudes, 0.0, 0.0)
    pairs = zip(found, expected, rounding, strict=True)
    return all(one == other or abs(one - other) <= 1e-6 * scale for one, other, scale in pairs)
