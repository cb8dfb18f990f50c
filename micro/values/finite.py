"""Flags for whether gradients were finite: booleans on a CPU, tensors on an accelerator that are read once a step.

On an accelerator the flags stay on the device until the host must decide on the step.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Finite = bool | Tensor  # a tensor is () bool, on the device
FirstBad = (
    int | Tensor | None
)  # index of the first bad element; a tensor is (1,), the vector's length where there is none


def is_finite_by(first_bad: FirstBad, numel: int) -> Finite:
    """Return whether a vector of ``numel`` has no bad element."""
    return (first_bad == numel).view(()) if isinstance(first_bad, Tensor) else first_bad is None


def index_of(first_bad: FirstBad, numel: int) -> int | None:
    """Return the index of the first bad element for the host, which waits for it; None where there is none."""
    if not isinstance(first_bad, Tensor):
        return first_bad
    index = int(first_bad)  # host sync: only for the message of an error
    return index if index < numel else None


def flag_of(is_finite: Finite, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (1,): 1 where all is finite, else 0."""
    if isinstance(is_finite, Tensor):
        return is_finite.view(1).to(dtype)
    return torch.full((1,), int(is_finite), dtype=dtype, device=device)


def with_flag(values: Tensor, flag: Finite) -> Tensor:
    """Return ``values`` (m,) and 1 behind them where the flag holds, else 0: (m + 1,)."""
    if isinstance(flag, Tensor):
        return torch.cat([values, flag_of(flag, values.dtype, values.device)])
    return torch.nn.functional.pad(values, (0, 1), value=float(flag))


def negated(flag: Finite) -> Finite:
    """Return whether it is not so."""
    return ~flag if isinstance(flag, Tensor) else not flag


def soonest(is_finite: Tensor) -> Finite:
    """Return a flag () as the host has it without waiting."""
    return bool(is_finite) if is_finite.is_cpu else is_finite


def is_zero(count: Tensor) -> Finite:
    """Return whether a count () of bad gradients is 0, as the host has it without waiting."""
    return not float(count) > 0 if count.is_cpu else ~(count > 0)


def is_number(total: Tensor) -> Finite:
    """Return whether a sum () is finite, as the host has it without waiting."""
    return math.isfinite(total) if total.is_cpu else (total - total) == 0  # torch.isfinite is four kernels


def all_finite(flags: Sequence[Finite]) -> Finite:
    """Return whether all flags are true."""
    late = [flag for flag in flags if isinstance(flag, Tensor)]
    return torch.stack(late).all() if late else all(flags)


def read(numbers: Sequence[Any]) -> list[Any]:
    """Return numbers (or None) with the tensors of an accelerator among them in the host's memory, by one read."""
    late = [x for x in numbers if isinstance(x, Tensor)]
    flat = [x.reshape(-1) for x in late]
    if any(x.dtype != flat[0].dtype for x in flat):
        flat = [x.double() for x in flat]
    host = (flat[0] if len(flat) == 1 else torch.cat(flat)).cpu()  # host sync: one for all
    parts = iter(host.split([x.numel() for x in late]))
    return [next(parts).to(x.dtype).view(x.shape) if isinstance(x, Tensor) else x for x in numbers]
