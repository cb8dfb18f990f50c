"""What passes a threshold on an accelerator, in lists of which the host does not know yet how long they are."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Passing:
    """What a scan found, all of it on the device of the vector.

    Attributes:
        indices: (room,) int32, ascending, then zeros.
        magnitudes: (room,) of the vector's dtype, then zeros.
        count: () int64, how many elements passed. Where it exceeds the room, those of the lowest indices are there.
    """

    indices: Tensor
    magnitudes: Tensor
    count: Tensor

    @property
    def room(self) -> int:
        """How many elements the lists can hold."""
        return self.indices.numel()

    def read(self, count: int) -> tuple[Tensor, Tensor]:
        """Return indices and magnitudes (count,), when the host has read the count; it is at most the room."""
        return self.indices[:count], self.magnitudes[:count]
