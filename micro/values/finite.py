"""Handle NaN and Inf on all ranks together, before they reach a residual or a model; numbers to and from a device.

Whether gradients were finite is a boolean on a CPU. On an accelerator it is a tensor that stays on the device until the
host must decide on the step.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Finite = bool | Tensor  # a tensor is () bool, on the device
FirstBad = int | Tensor | None
"""Index of the first bad element; a tensor is (1,), the vector's length where there is none."""
Policy = Literal["stop", "skip"]
"""What to do about NaN or Inf: raise on all ranks, or make that step's update zero."""


def check_policy(policy: str) -> None:
    """Raise ValueError unless ``policy`` is 'stop' or 'skip'."""
    if policy not in get_args(Policy):
        raise ValueError(f"nonfinite must be one of {', '.join(get_args(Policy))}, got '{policy}'")


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


def with_count(values: Tensor, is_finite: Finite) -> Tensor:
    """Return ``values`` (m,), and behind them how many gradients of this rank are not finite, 0 or 1: (m + 1,)."""
    if isinstance(is_finite, Tensor):
        return torch.cat([values, ~is_finite.view(1)])
    return torch.nn.functional.pad(values, (0, 1), value=float(not is_finite))


def negated(flag: Finite) -> Finite:
    """Return whether it is not so."""
    return ~flag if isinstance(flag, Tensor) else not flag


def soonest(is_finite: Tensor) -> Finite:
    """Return a flag () as the host has it without waiting."""
    return bool(is_finite) if is_finite.is_cpu else is_finite


def is_zero(count: Tensor) -> Finite:
    """Return whether a count () of bad gradients is 0, as the host has it without waiting."""
    return float(count) <= 0 if count.is_cpu else count <= 0


def all_finite(flags: Sequence[Finite]) -> Finite:
    """Return whether all flags are true."""
    late = [flag for flag in flags if isinstance(flag, Tensor)]
    return torch.stack(late).all() if late else all(flags)


def read(numbers: Sequence[Any]) -> list[Any]:
    """Return numbers (or None) with the tensors of an accelerator among them in the host's memory, by one read."""
    late = [x for x in numbers if isinstance(x, Tensor)]
    flat = [x.reshape(-1) for x in late]
    if any(x.dtype != flat[0].dtype for x in flat):
        flat = [x if x.dtype in (torch.bool, torch.float32) else x.double() for x in flat]
    host = (flat[0] if len(flat) == 1 else torch.cat(flat)).cpu()  # host sync: one for all
    parts = iter(host.split([x.numel() for x in late]))
    return [next(parts).to(x.dtype).view(x.shape) if isinstance(x, Tensor) else x for x in numbers]


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``numbers`` as a tensor of ``device``; the host waits for nothing."""
    return to_device(torch.tensor(numbers, dtype=dtype), device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x``, of the CPU, on ``device``; the host waits for nothing, and may change ``x`` at once.

    A GPU copies from pinned memory, which PyTorch gives to nobody else before the copy is made. From other memory it
    may still read after the call has returned.
    """
    if device.type != "cuda":
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
    return pinned.to(device, non_blocking=True)
