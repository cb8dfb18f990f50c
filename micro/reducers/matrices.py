"""The matrices in a flat vector, those of one shape together; and what of it is no matrix worth approximating."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from micro.flat import Layout


@dataclass(frozen=True, slots=True)
class Batch:
    """The parameters that are matrices of one shape: their names, their places, and rows x columns at this rank."""

    names: tuple[str, ...]
    places: tuple[slice, ...]
    rows: int
    columns: int
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements of all its matrices."""
        return len(self.names) * self.rows * self.columns

    def gather(self, vector: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the matrices (m, rows, columns), copied out of ``vector`` (numel,), into ``memory`` if given."""
        out = None if memory is None else memory.view(len(self.names), self.rows, self.columns)
        return torch.stack([vector[place].view(self.rows, self.columns) for place in self.places], out=out)


@lru_cache(maxsize=64)
def batches_of(layout: Layout, rank: int, min_compression: float) -> tuple[Batch, ...]:
    """Return what is approximated, matrices of the same shape together."""
    by_shape: dict[tuple[int, int], list[tuple[str, slice]]] = {}
    for (name, place), shape in zip(layout.slices(), layout.shapes, strict=True):
        if len(shape) < 2:
            continue
        rows, columns = shape[0], (place.stop - place.start) // max(shape[0], 1)
        if rows * columns >= min_compression * min(rank, rows, columns) * (rows + columns) > 0:
            by_shape.setdefault((rows, columns), []).append((name, place))
    return tuple(
        Batch(tuple(name for name, _ in group), tuple(place for _, place in group), *shape, min(rank, *shape))
        for shape, group in by_shape.items()
    )


def copied(batches: Sequence[Batch], vector: Tensor, memory: Tensor) -> list[Tensor]:
    """Return the matrices of all batches, copied out of ``vector`` (numel,) into ``memory`` (numel,)."""
    sizes = [batch.numel for batch in batches]
    pieces = memory[: sum(sizes)].split(sizes)
    return [batch.gather(vector, piece) for batch, piece in zip(batches, pieces, strict=True)]


@lru_cache(maxsize=64)
def rest_of(layout: Layout, rank: int, min_compression: float, device: str) -> Tensor:
    """Return the (m,) indices of everything that travels whole."""
    whole = torch.ones(layout.numel, dtype=torch.bool)
    for batch in batches_of(layout, rank, min_compression):
        for place in batch.places:
            whole[place] = False
    return torch.nonzero(whole).view(-1).to(device)
