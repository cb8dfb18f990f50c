"""View named tensors as one flat vector, and back."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

MAX_NUMEL = 2**31 - 1  # indices travel as int32

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The order in which named parameters lie in one flat vector.

    Args:
        names: one name per parameter, unique, in flat order.
        shapes: one shape per name.

    Raises:
        ValueError: names repeat, lengths differ, nothing is in it, or it is too long for int32 indices.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(f"layout needs one shape per name, got {len(self.names)} names, {len(self.shapes)} shapes")
        if len(set(self.names)) != len(self.names):
            raise ValueError("names of a layout must be unique")
        if not 0 < self.numel <= MAX_NUMEL:
            raise ValueError(f"numel of a layout must be in [1, {MAX_NUMEL}], got {self.numel}")

    @classmethod
    def of(cls, tensors: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> "Layout":
        """Return the layout of a module's trainable parameters, or of named tensors, in the order given."""
        if isinstance(tensors, nn.Module):
            tensors = [(name, p) for name, p in tensors.named_parameters() if p.requires_grad]
        pairs = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
        return cls(tuple(name for name, _ in pairs), tuple(tuple(t.shape) for _, t in pairs))

    @classmethod
    def flat(cls, numel: int, name: str = "flat") -> "Layout":
        """Return the layout of a single vector of ``numel`` elements, for studies that have no model."""
        return cls((name,), ((numel,),))

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(map(math.prod, self.shapes))  # torch.Size.numel() wraps at 2^64

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the flat vector."""
        starts, total = [], 0
        for numel in self.numels:
            starts.append(total)
            total += numel
        return tuple(starts)

    @cached_property
    def numel(self) -> int:
        """Length of the flat vector."""
        return sum(self.numels)

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        return {}

    def kept(self, make: Callable[..., T], *given: Any) -> T:
        """Return ``make(self, *given)``, made at the first call and kept as long as this object.

        What is the same in every step of a bucket is kept so: the bucket's state holds its layout.
        """
        found = self._kept.get((make, given))
        if found is None:
            found = self._kept[make, given] = make(self, *given)
        kept: T = found
        return kept

    def slices(self) -> Iterator[tuple[str, slice]]:
        """Yield each name with its place in the flat vector."""
        for name, offset, numel in zip(self.names, self.offsets, self.numels, strict=True):
            yield name, slice(offset, offset + numel)

    def name_at(self, index: int) -> str:
        """Return the parameter to which a flat index belongs."""
        return next(name for name, place in self.slices() if place.start <= index < place.stop)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of ``vector`` (numel,) by name, each in its parameter's shape; memory is shared."""
        return {
            name: vector[place].view(shape) for (name, place), shape in zip(self.slices(), self.shapes, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a new (numel,) vector that holds ``tensors`` in this layout's order."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return 1-D views of ``vector`` (numel,) by name; memory is shared."""
        return {name: vector[place] for name, place in self.slices()}


def joined(*layouts: Layout) -> Layout:
    """Return the layout of several vectors, one behind the other in one."""
    names = tuple(name for layout in layouts for name in layout.names)
    return Layout(names, tuple(shape for layout in layouts for shape in layout.shapes))


def real(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as real numbers: itself, or a view (..., 2) of real and imaginary parts where it is complex."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def regroup(pieces: Mapping[str, Tensor], layout: Layout, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a (numel,) vector in ``layout``'s order, filled from named pieces; what has no piece is zero.

    This is how residuals outlive a change of buckets: they are kept by parameter name, never by bucket number.
    """
    vector = torch.zeros(layout.numel, dtype=dtype, device=device)
    for name, place in layout.slices():
        if name in pieces:
            vector[place].copy_(pieces[name].reshape(-1))
            if pieces[name].is_cuda:  # those of a state that was loaded are of another stream than a lane's
                pieces[name].record_stream(torch.cuda.current_stream(device))
    return vector
