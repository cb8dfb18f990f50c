"""DSA: every rank adds up one region of the vector, then all gather the sums, as pairs or dense."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.exchanges.base import Exchange, NoState, Transport, Wire
from micro.exchanges.gathering import count_of, gather_header, gather_indices, gather_values, header_call
from micro.exchanges.regions import Spans, add_up, add_up_calls
from micro.exchanges.traffic import Choice
from micro.partition import equal_slices
from micro.requests import Once, Reduction
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, summed
from micro.traffic import Calls


@dataclass(frozen=True, slots=True, kw_only=True)
class DSA(Exchange[NoState]):
    """Send every entry to the rank that owns its region, add up there, gather the sums: as pairs, or dense if shorter.

    The vector has world_size equal regions. An index gets the values of only those ranks that chose it, divided by
    all ranks, as with `Gather`, but its sum travels once however many ranks chose it. A codec's rounding stays in the
    residual of the rank that rounds.

    Bytes sent, with int32 indices and values of w bytes: (4 + w) for each of a rank's entries in another rank's
    region; then (n-1) (4 + w) for each distinct index in its own region, or (n-1) w for each element of it; 16 (n-1)
    for lengths, counts and the finite flag.

    Source: the dynamic sparse all-reduce, split and gather, of Renggli et al., SparCML, SC 2019, arXiv 1802.08021.
    Differences: the sums travel dense where that takes fewer bytes in all. `PublishedDSA` is the baseline of the public
    code of Ok-Topk.
    """

    name: ClassVar[str] = "dsa"
    rule: ClassVar[str] = "repaired"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})
    splits: ClassVar[bool] = True

    def exchange(self, state: NoState, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Return the sum of all ranks' pairs, divided by the number of ranks."""
        chosen = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        spans = equal_slices(acc.numel(), transport.comm.world_size)
        decoded, total = yield from add_up(self.leaving(chosen), spans, transport)
        is_finite = transport.step.is_finite
        header = yield from gather_header(selection.indices, is_finite=is_finite, extra=count_of(total))
        counts, dense = yield Once(work=lambda: self._form(header.extras, spans, transport.wire, acc.dtype))
        gathering = _gather_dense(total, spans, transport) if dense else _gather_pairs(total, counts, spans, transport)
        mean, unsent = yield from gathering
        return Exchanged(
            update=(mean,),
            sent=self.sent(chosen, [decoded, *unsent]),
            counts=header.counts,
            num_updated=mean.indices.numel(),
            is_finite=header.is_finite,
        )

    def leaving(self, chosen: SparseValues) -> SparseValues:
        """Return what a rank sends of its choice: all of it."""
        return chosen

    def sent(self, chosen: SparseValues, decoded: list[SparseValues]) -> SparseValues:
        """Return what leaves this rank's residual: what the receivers decoded."""
        return summed(decoded)

    def is_dense(self, sizes: Sequence[int], counts: Sequence[int], wire: Wire, dtype: torch.dtype) -> bool:
        """Return whether the sums travel dense: where that takes fewer bytes than pairs.

        Args:
            sizes, counts: elements and sums of each region.
        """
        pairs = sum(
            wire.indices.num_bytes(count, size) + wire.values.num_bytes(count, dtype)
            for count, size in zip(counts, sizes, strict=True)
        )
        return sum(wire.values.num_bytes(size, dtype) for size in sizes) < pairs

    def _form(self, extras: list[list[int]], spans: Spans, wire: Wire, dtype: torch.dtype) -> tuple[list[int], bool]:
        """Return how many sums the regions have, and whether they travel dense."""
        counts = [count for (count,) in extras]
        return counts, self.is_dense([stop - start for start, stop in spans], counts, wire, dtype)

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return entries to their regions, the header, and the sums; see Exchange."""
        n, held, size = choice.world_size, choice.total / choice.world_size, choice.numel / choice.world_size
        indices, values = choice.indices(held, size), choice.values(held)
        sums: Calls = (("gather_lists", indices), ("gather_lists", values))
        if self.is_dense([round(size)] * n, [round(held)] * n, choice.wire, choice.dtype):
            sums = (("gather_lists", choice.values(size)),)
        return (*add_up_calls(choice, choice.chosen), header_call(num_extras=1), *sums), choice.total


def _gather_pairs(
    total: SparseValues, counts: list[int], spans: Spans, transport: Transport
) -> Reduction[tuple[SparseValues, list[SparseValues]]]:
    """Return the means of all regions, of which this rank has the ``total``, and what encoding added to its sums."""
    selection = Selection(total.indices, spans=tuple(spans))
    indices = yield from gather_indices(selection, tuple(counts), spans[-1][1], transport)
    mean, unsent = yield from _means(total, counts, transport)
    return SparseValues(indices, mean), unsent


def _gather_dense(
    total: SparseValues, spans: Spans, transport: Transport
) -> Reduction[tuple[SparseValues, list[SparseValues]]]:
    """Return what `_gather_pairs` does; every element of the regions travels."""
    start, stop = spans[transport.comm.rank]
    region = total.values.new_zeros(stop - start)
    region[(total.indices - start).long()] = total.values
    places = torch.arange(start, stop, dtype=torch.int32, device=region.device)
    sizes = [stop - start for start, stop in spans]
    mean, unsent = yield from _means(SparseValues(places, region), sizes, transport)
    found = yield Once(work=lambda: _without_zeros(mean))
    return found, unsent


def _means(
    total: SparseValues, counts: list[int], transport: Transport
) -> Reduction[tuple[Tensor, list[SparseValues]]]:
    """Return the means of all regions, and what encoding added to this rank's sums."""
    n, codec, dtype = transport.comm.world_size, transport.wire.values, total.values.dtype
    encoded = codec.encode(total.values / n, (*transport.key, n))
    means = yield from gather_values(encoded, counts, codec, dtype)
    if codec.lossless:
        return means, []
    rounding = n * means.split(counts)[transport.comm.rank] - total.values
    return means, [SparseValues(total.indices, rounding)]


def _without_zeros(vector: Tensor) -> SparseValues:
    """Return the entries of ``vector`` (numel,) that are not zero."""
    indices = torch.nonzero(vector).view(-1)
    return SparseValues(indices.to(torch.int32), vector[indices])
