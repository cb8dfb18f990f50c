"""Sums in equal regions, gathered as pairs or dense: what the two rules of DSA share."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.exchanges.base import (
    Exchange,
    Header,
    Wire,
    gather_header,
    gather_indices,
    gather_values,
    header_row,
    headers_of,
)
from micro.exchanges.regions import Transport
from micro.exchanges.slots import Slots, add_up_in_slots
from micro.health import Finite
from micro.partition import equal_slices
from micro.sparse import Exchanged, Overlap, Padded, Selection, SparseValues, Step


@dataclass(frozen=True, slots=True)
class RegionSums:
    """What this rank has when entries were added up in regions.

    Attributes:
        decoded: what it sent, as its receivers decode it.
        sums: in its region.
        header: of the step; its one extra integer is the number of sums in each rank's region.
    """

    decoded: SparseValues
    sums: Padded
    header: Header


Means = tuple[SparseValues, int | Tensor, list[SparseValues]]
"""The means of all regions, how many of them are in the update, and what rounding added to this rank's sums."""


class SplitAndGather(Exchange[Slots]):
    """Send every entry to the rank that owns its region, add up there, gather the sums: as pairs or dense.

    A subclass says what of its choice a rank sends, what it books as sent, and when the sums travel dense.

    On an accelerator, pairs of int32 indices and raw values travel to the regions in slots with some room, once it is
    known how many went there in the last step (`Slots`): the host reads once in a step. Where a slot of any rank was
    too short, what it held is sent once more, in lists of exact lengths, and the step is ``overfull``.
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

    def start(self) -> Slots:
        """Return a state that knows no lengths yet."""
        return Slots()

    def save(self, state: Slots) -> dict[str, Any]:
        """Return nothing: lengths are learned again."""
        return {}

    def exchange(
        self,
        state: Slots,
        acc: Tensor,
        selection: Selection,
        *,
        step: Step,
        overlap: Overlap,
        wire: Wire,
        comm: Comm,
        is_finite: Finite,
    ) -> Exchanged:
        """Return the sum of all ranks' pairs, divided by the number of ranks."""
        chosen = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        regions = EqualRegions(Transport(comm, wire, (step.seed, step.index, comm.rank)), acc.numel())
        leaving, in_slots = self.leaving(chosen), state.serve(step.target_count, acc, regions.transport)
        found = _summed_in_slots(state, leaving, chosen, regions, is_finite) if in_slots else None
        is_overfull = in_slots and found is None
        found = found or _summed(state, leaving, chosen, regions, is_finite)
        header = found.header
        counts, dense = comm.alike(lambda: self._form(regions, header, acc.dtype))
        total = found.sums.read(counts[comm.rank])
        mean, num_updated, unsent = regions.gather_dense(total) if dense else regions.gather_pairs(total, counts)
        return Exchanged(
            update=(mean,),
            sent=self.sent(chosen, [found.decoded, *unsent]),
            counts=header.counts,
            num_updated=num_updated,
            is_finite=header.is_finite,
            overfull=is_overfull,
        )

    def _form(self, regions: "EqualRegions", header: Header, dtype: torch.dtype) -> tuple[list[int], bool]:
        """Return how many sums the regions have, and whether they travel dense."""
        counts = [count for (count,) in header.extras]
        return counts, self.is_dense(regions, counts, dtype)


def _summed(
    state: Slots, leaving: SparseValues, chosen: SparseValues, regions: "EqualRegions", is_finite: Finite
) -> RegionSums:
    """Add up in regions what leaves, in lists of exact lengths; see `RegionSums`."""
    decoded, sums = regions.transport.add_up(leaving, regions.spans, state)
    header = gather_header(chosen.indices, regions.transport.comm, is_finite=is_finite, extra=sums.message)
    return RegionSums(decoded, sums, header)


def _summed_in_slots(
    state: Slots, leaving: SparseValues, chosen: SparseValues, regions: "EqualRegions", is_finite: Finite
) -> RegionSums | None:
    """Add up in regions what leaves, by one read; None, on all ranks alike, where a slot was too short."""
    comm = regions.transport.comm
    found = add_up_in_slots(leaving, regions.spans, state, regions.transport)
    extra = torch.cat([found.sums.message, found.fit.view(1).to(torch.int32)])
    rows = comm.gather_rows(header_row(chosen.indices, is_finite=is_finite, extra=extra))
    # host sync: list lengths shape the next message
    numbers_read = torch.cat([rows.view(-1).long(), found.numbers]).tolist()
    header = headers_of(numbers_read[: rows.numel()], comm.world_size)
    state.learn(numbers_read[rows.numel() : -comm.world_size], numbers_read[-comm.world_size :])
    if not all(fit for _, fit in header.extras):
        state.widen()
        return None
    return RegionSums(leaving, found.sums, replace(header, extras=[[count] for count, _ in header.extras]))


@dataclass(frozen=True, slots=True)
class EqualRegions:
    """Equal regions of the vector (numel,), one for each rank."""

    transport: Transport
    numel: int

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of every rank's region."""
        return equal_slices(self.numel, self.transport.comm.world_size)

    def gather_pairs(self, total: SparseValues, counts: list[int]) -> Means:
        """Return what all regions come to, of which this rank has the ``total``; pairs travel."""
        selection = Selection(total.indices, spans=self.spans)
        comm, form = self.transport.comm, self.transport.wire.indices
        indices = gather_indices(selection, tuple(counts), Overlap.DISJOINT, self.numel, form, comm)
        mean, unsent = self._means(total, counts)
        return SparseValues(indices, mean), indices.numel(), unsent

    def gather_dense(self, total: SparseValues) -> Means:
        """Return what all regions come to, of which this rank has the ``total``; every element travels."""
        start, stop = self.spans[self.transport.comm.rank]
        region = total.values.new_zeros(stop - start)
        region[(total.indices - start).long()] = total.values
        places = torch.arange(start, stop, dtype=torch.int32, device=region.device)
        mean, unsent = self._means(SparseValues(places, region), [stop - start for start, stop in self.spans])
        return *self.transport.comm.alike(lambda: _soonest_without_zeros(mean)), unsent

    def _means(self, total: SparseValues, counts: list[int]) -> tuple[torch.Tensor, list[SparseValues]]:
        """Return the means of all regions, and what encoding added to this rank's sums."""
        comm, codec, dtype = self.transport.comm, self.transport.wire.values, total.values.dtype
        n = comm.world_size
        encoded = codec.encode(total.values / n, (*self.transport.key, n))
        means = gather_values(encoded, counts, codec, dtype, comm)
        if codec.lossless:
            return means, []
        rounding = n * means.split(counts)[comm.rank] - total.values
        return means, [SparseValues(total.indices, rounding)]


def _soonest_without_zeros(vector: Tensor) -> tuple[SparseValues, int | Tensor]:
    """Return the entries of ``vector`` (numel,) that are not zero, and their number; an accelerator's zeros stay."""
    if vector.device.type != "cpu":
        places = torch.arange(vector.numel(), dtype=torch.int32, device=vector.device)
        return SparseValues(places, vector), torch.count_nonzero(vector)
    indices = torch.nonzero(vector).view(-1)
    return SparseValues(indices.to(torch.int32), vector[indices]), indices.numel()
