"""Gather: every rank sends its own pairs of index and value to all others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Literal

import torch
from torch import Tensor

from micro.comm import Comm
from micro.exchanges.base import Exchange, NoState, Wire, gather_indices
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step, union


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(Exchange[NoState]):
    """Gather (index, value) pairs; an index gets the values of those ranks alone that chose it, divided by all ranks.

    Only a rank's own choice leaves its residual. Bytes sent per rank: (n-1) (4 + w) k_r with int32 indices (none where
    all ranks hold the same) and values of w bytes, and 8 (n-1) for the count and the health flag.

    Args:
        rule: 'published', the gathered pairs are cut into world_size equal slices, as if every rank had sent as many,
            as in the public code of Gaussian-k and SIDCo. Where ranks sent unequal numbers, the N mod world_size last
            of the N pairs are dropped, and of two pairs of one index in one slice the first is, although their
            residuals have let them go. None, nothing is lost.

    Source: the allgather scheme of sparse SGD, e.g. Shi et al., arXiv 1911.08772; its public code, and that of
    Abdelmoniem et al., SIDCo, MLSys 2021, arXiv 2101.10761, for the rule. Differences: int32 indices, lists sent
    unpadded, added up in rank order so that all ranks get the same bits.

    Raises:
        ValueError: no such rule.
    """

    rule: Literal["published"] | None = None
    name: ClassVar[str] = "gather"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT, Overlap.SAME})

    def __post_init__(self) -> None:
        if self.rule not in (None, "published"):
            raise ValueError(f"rule of gather must be published or left out, got '{self.rule}'")

    @property
    def splits(self) -> bool:  # type: ignore[override]  # depends on the rule
        """Whether it may be called for each piece of the vector by itself."""
        return self.rule is None

    def exchange(
        self,
        state: NoState,
        acc: Tensor,
        selection: Selection,
        *,
        step: Step,
        overlap: Overlap,
        wire: Wire,
        comm: Comm,
        healthy: bool,
    ) -> Exchanged:
        """Return the sum of all ranks' pairs, divided by the number of ranks."""
        counts, healthy = gather_header(selection.indices, comm, healthy=healthy)
        codec, dtype = wire.values, acc.dtype
        encoded = codec.encode(acc.index_select(0, selection.indices), (step.seed, step.index, comm.rank))
        indices = gather_indices(selection, counts, overlap, acc.numel(), wire.indices, comm)
        blobs = comm.gather_lists(encoded, [codec.num_bytes(count, dtype) for count in counts], "values")
        values = (codec.decode(blob, count, dtype) for blob, count in zip(blobs, counts, strict=True))
        if len(indices) == 1:  # shared by all ranks: one vector adds up, and nothing is left to unite
            parts: tuple[SparseValues, ...] = (SparseValues(indices[0], reduce(torch.add, values) / comm.world_size),)
            num_updated = indices[0].numel()
        else:
            parts = tuple(SparseValues(i, v / comm.world_size) for i, v in zip(indices, values, strict=True))
            if self.rule == "published":
                parts = tuple(_equal_slices(parts))
            found = [part.indices for part in parts]
            num_updated = sum(map(len, found)) if overlap is Overlap.DISJOINT else union(found).numel()
        sent = SparseValues(selection.indices, codec.decode(encoded, selection.indices.numel(), dtype))
        return Exchanged(update=parts, sent=sent, counts=counts, num_updated=num_updated, healthy=healthy)


def _equal_slices(parts: Sequence[SparseValues]) -> Iterator[SparseValues]:
    """Yield the pairs of all ranks cut into as many equal slices, the last of an index's pairs in each slice."""
    indices, values = torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
    size = indices.numel() // len(parts)
    places = torch.arange(size, device=indices.device)
    for start in (size * part for part in range(len(parts))):
        unique, group = torch.unique(indices[start : start + size], return_inverse=True)
        last = places.new_zeros(unique.numel()).scatter_reduce_(0, group, places, "amax")
        yield SparseValues(unique, values[start + last])


def gather_header(indices: Tensor, comm: Comm, *, healthy: bool) -> tuple[tuple[int, ...], bool]:
    """Return how many indices each rank chose, and whether all ranks were healthy: 8 (n-1) bytes."""
    header = torch.tensor([indices.numel(), int(healthy)], dtype=torch.int32, device=indices.device)
    rows = comm.gather_rows(header).tolist()  # host sync: list lengths shape the next message
    return tuple(row[0] for row in rows), all(row[1] for row in rows)
