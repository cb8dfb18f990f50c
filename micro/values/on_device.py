"""Copy numbers from the host to a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
