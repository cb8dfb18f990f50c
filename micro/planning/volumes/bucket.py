"""What the collectives of a reducer are computed for."""

from dataclasses import dataclass

import torch

from micro.flat import Layout

_DTYPES = {2: torch.float32, 4: torch.float32, 8: torch.float64}  # of the accumulator


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A vector that ``world_size`` ranks reduce together; the fields are arguments of micro.planning.volumes.volume_of.

    Raises:
        ValueError: no elements or ranks, a layout of another length, or a width that no gradient has.
    """

    numel: int
    world_size: int
    build_up: float | None = None
    local_count: float | None = None
    longest_count: float | None = None
    layout: Layout | None = None
    element_bytes: int = 4

    def __post_init__(self) -> None:
        if self.numel < 1 or self.world_size < 1:
            raise ValueError(f"numel and world_size must be at least 1, got {self.numel} and {self.world_size}")
        if self.layout is not None and self.layout.numel != self.numel:
            raise ValueError(f"layout has {self.layout.numel} elements, the bucket {self.numel}")
        if self.element_bytes not in _DTYPES:
            raise ValueError(f"element_bytes must be one of {', '.join(map(str, _DTYPES))}, got {self.element_bytes}")

    @property
    def dtype(self) -> torch.dtype:
        """Of the accumulator."""
        return _DTYPES[self.element_bytes]

    @property
    def named(self) -> Layout:
        """The layout, or that of one vector."""
        return self.layout or Layout.flat(self.numel)
