"""Whether a GPU runs the kernels, and computes with them what torch does."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from micro.health import index_of
from micro.kernels import reference
from micro.kernels.triton import summing
from micro.kernels.triton.absorbing import absorb_
from micro.kernels.triton.scanning import above, largest, magnitude_counts

OLDEST = (8, 0)  # compute capability for which the kernels are compiled in the tests
NUMEL = 300_001  # more programs of a kernel than run at once
ONE_BITS = 0x3F800000  # 1.0 as bits of a float32
BIN_SHIFT = 20  # an eighth of a power of two


def check(device: torch.device) -> None:
    """Run each kernel that methods use on ``device``, and compare it with torch. The host waits a few times.

    Raises:
        RuntimeError: the GPU is too old, or a kernel's result is not torch's.
        Exception: whatever Triton, the driver or the C compiler raise.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        raise RuntimeError(f"compute capability must be at least {OLDEST}, got {capability}")
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).to(device)
    pairs: dict[str, Callable[[], bool]] = {
        "adding a gradient": lambda: _absorbs(x, 1.0),
        "adding a gradient with NaN": lambda: _absorbs(x, math.nan),
        "the scan": lambda: _equal(above(x, 2.0), reference.above(x, 2.0)),
        "counting": lambda: _equal(
            [magnitude_counts(x, ONE_BITS, BIN_SHIFT, 16)], [reference.magnitude_counts(x, ONE_BITS, BIN_SHIFT, 16)]
        ),
        "top-k": lambda: _equal([largest(x, 999)], [reference.largest(x, 999)]),
        "summing up": lambda: are_near(summing.sums(x, 1.0), reference.sums(x, 1.0)),
        "adding a gradient and summing up": lambda: _absorbs_and_sums(x),
    }
    for name, is_right in pairs.items():
        if not is_right():
            raise RuntimeError(f"{name} gives another result than torch")


def _absorbs(x: Tensor, number: float) -> bool:
    """Whether a gradient that holds a given number is added, and searched for what is not finite, as torch does."""
    ours, theirs = [(x.clone(), x.flip(0)) for _ in range(2)]
    for _, grad in (ours, theirs):
        grad[NUMEL // 2] = number
    return index_of(absorb_(*ours), NUMEL) == index_of(reference.absorb_(*theirs), NUMEL) and _equal(ours, theirs)


def _absorbs_and_sums(x: Tensor) -> bool:
    """Whether a gradient is added as torch does, and the sums are near its sums."""
    ours, theirs = [(x.clone(), x.flip(0)) for _ in range(2)]
    first_bad, found = summing.absorb_and_sum_(*ours)
    is_added = index_of(first_bad, NUMEL) == index_of(reference.absorb_(*theirs), NUMEL) and _equal(ours, theirs)
    return is_added and are_near(found, reference.sums(theirs[0], -1.0))


def are_near(found: Sequence[float], expected: Sequence[float]) -> bool:
    """Return whether the numbers of `Sums` differ by rounding alone."""
    squares, magnitudes = expected[2:4]
    rounding = (0.0, magnitudes, squares, magnitudes, 0.0, 0.0)
    pairs = zip(found, expected, rounding, strict=True)
    return all(one == other or abs(one - other) <= 1e-6 * scale for one, other, scale in pairs)


def _equal(ours: tuple[Tensor, ...] | list[Tensor], theirs: tuple[Tensor, ...] | list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
