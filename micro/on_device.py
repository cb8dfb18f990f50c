"""Numbers of the host on their way to a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``numbers`` as a tensor of ``device``; the host does not wait for what was queued there before.

    ``torch.tensor(numbers, device=device)`` waits. The driver has copied the numbers when this returns.
    """
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)
