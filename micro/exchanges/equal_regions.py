"""Sums in equal regions, gathered as pairs or dense: what the two rules of DSA share."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.exchanges.base import (
    Exchange,
    Header,
    NoState,
    Wire,
    count_of,
    gather_header,
    gather_indices,
    gather_values,
)
from micro.exchanges.regions import Transport
from micro.health import Finite
from micro.partition import equal_slices
from micro.requests import Once, Reduction
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step

Means = tuple[SparseValues, int, list[SparseValues]]
"""The means of all regions, how many of them are in the update, and what rounding added to this rank's sums."""


class SplitAndGather(Exchange[NoState]):
    """Send every entry to the rank that owns its region, add up there, gather the sums: as pairs or dense.

    A subclass says what of its choice a rank sends, what it books as sent, and when the sums travel dense.
    """

    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})

    @abstractmethod
    def leaving(self, chosen: SparseValues) -> SparseValues:
        """Return what a rank sends of its choice."""

    @abstractmethod
    def is_dense(self, regions: "EqualRegions", counts: list[int], dtype: torch.dtype) -> bool:
        """Return whether the sums, ``counts`` of them in the regions, travel dense."""

    @abstractmethod
    def sent(self, chosen: SparseValues, decoded: list[SparseValues]) -> SparseValues:
        """Return what leaves this rank's residual: by its choice, or by what the receivers decoded."""

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
        is_finite: Finite,
    ) -> Reduction[Exchanged]:
        """Return the sum of all ranks' pairs, divided by the number of ranks."""
        chosen = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        regions = EqualRegions(Transport(comm, wire, (step.seed, step.index, comm.rank)), acc.numel())
        decoded, total = yield from regions.transport.add_up(self.leaving(chosen), regions.spans)
        header = yield from gather_header(selection.indices, is_finite=is_finite, extra=count_of(total))
        counts, dense = yield Once(work=lambda: self._form(regions, header, acc.dtype))
        gathering = regions.gather_dense(total) if dense else regions.gather_pairs(total, counts)
        mean, num_updated, unsent = yield from gathering
        return Exchanged(
            update=(mean,),
            sent=self.sent(chosen, [decoded, *unsent]),
            counts=header.counts,
            num_updated=num_updated,
            is_finite=header.is_finite,
        )

    def _form(self, regions: "EqualRegions", header: Header, dtype: torch.dtype) -> tuple[list[int], bool]:
        """Return how many sums the regions have, and whether they travel dense."""
        counts = [count for (count,) in header.extras]
        return counts, self.is_dense(regions, counts, dtype)


@dataclass(frozen=True, slots=True)
class EqualRegions:
    """Equal regions of the vector (numel,), one for each rank."""

    transport: Transport
    numel: int

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of every rank's region."""
        return equal_slices(self.numel, self.transport.comm.world_size)

    def gather_pairs(self, total: SparseValues, counts: list[int]) -> Reduction[Means]:
        """Return what all regions come to, of which this rank has the ``total``; pairs travel."""
        selection = Selection(total.indices, spans=self.spans)
        comm, form = self.transport.comm, self.transport.wire.indices
        indices = yield from gather_indices(selection, tuple(counts), Overlap.DISJOINT, self.numel, form, comm)
        mean, unsent = yield from self._means(total, counts)
        return SparseValues(indices, mean), indices.numel(), unsent

    def gather_dense(self, total: SparseValues) -> Reduction[Means]:
        """Return what all regions come to, of which this rank has the ``total``; every element travels."""
        start, stop = self.spans[self.transport.comm.rank]
        region = total.values.new_zeros(stop - start)
        region[(total.indices - start).long()] = total.values
        places = torch.arange(start, stop, dtype=torch.int32, device=region.device)
        mean, unsent = yield from self._means(
            SparseValues(places, region), [stop - start for start, stop in self.spans]
        )
        found, num_updated = yield Once(work=lambda: _without_zeros(mean))
        return found, num_updated, unsent

    def _means(self, total: SparseValues, counts: list[int]) -> Reduction[tuple[Tensor, list[SparseValues]]]:
        """Return the means of all regions, and what encoding added to this rank's sums."""
        comm, codec, dtype = self.transport.comm, self.transport.wire.values, total.values.dtype
        n = comm.world_size
        encoded = codec.encode(total.values / n, (*self.transport.key, n))
        means = yield from gather_values(encoded, counts, codec, dtype)
        if codec.lossless:
            return means, []
        rounding = n * means.split(counts)[comm.rank] - total.values
        return means, [SparseValues(total.indices, rounding)]


def _without_zeros(vector: Tensor) -> tuple[SparseValues, int]:
    """Return the entries of ``vector`` (numel,) that are not zero, and their number."""
    indices = torch.nonzero(vector).view(-1)
    return SparseValues(indices.to(torch.int32), vector[indices]), indices.numel()
