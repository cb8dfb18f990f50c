"""Numbers of a device on their way to the host, which waits only when it asks for them."""

from typing import Any

import torch
from torch import Tensor


class Late:
    """A copy of ``numbers`` (m,) as they are on the device now; the host goes on meanwhile.

    On a GPU the copy goes to memory that the driver has pinned, and an event says when it is there. While a CUDA graph
    is captured nothing is copied: the numbers of the last replay are read when they are asked for.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._copy, self._copied = numbers, None
        if numbers.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._copy.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[Any]:
        """Return the numbers, when they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[Any] = self._copy.tolist()  # host sync: only in a captured graph, else they are on the host
        return numbers
