"""DSA: every rank adds up one region of the vector, then all gather the sums, as pairs or dense."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from micro.codecs.base import Key
from micro.codecs.raw import Raw
from micro.comm import Comm
from micro.exchanges.base import Exchange, NoState, Wire, gather_indices
from micro.partition import equal_slice
from micro.parts import Rule, check_rule
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class DSA(Exchange[NoState]):
    """Send every entry to the rank that owns its region, add up there, gather the sums: as pairs, or dense if shorter.

    The vector has world_size equal regions. An index gets the values of those ranks alone that chose it, divided by
    all ranks, as with `Gather`, but its sum travels once however many ranks chose it. A codec's rounding stays in the
    residual of the rank that rounds.

    Bytes sent, with int32 indices and values of w bytes: (4 + w) for each of a rank's entries in another rank's
    region; then (n-1) (4 + w) for each distinct index in its own region, or (n-1) w for each element of it; 16 (n-1)
    for lengths, counts and the health flag.

    Args:
        rule: 'repaired', the sums travel dense where that takes fewer bytes in all; 'published', where the update has
            at least numel / 3 indices, and a rank sends of its choice only what is strictly above the smallest
            magnitude in it, as in the public code, although its residual loses the whole choice: that entry and its
            ties are lost in every step.

    Source: the dynamic sparse all-reduce, split and gather, of Renggli et al., SparCML, SC 2019, arXiv 1802.08021.
    'published' is the baseline TopkDSA in the public code of Li and Hoefler, Ok-Topk, PPoPP 2022, arXiv 2201.07598.
    Differences: int32 indices (that code sends them as float32); regions differ by one element at most (its last takes
    what is left), also with fewer elements than ranks (it divides by zero).

    Raises:
        ValueError: no such rule; 'published' with a codec for values.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "dsa"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})

    def __post_init__(self) -> None:
        check_rule(self)

    def check_wire(self, wire: Wire) -> None:
        """Raise ValueError where values or indices cannot travel in this form."""
        Exchange.check_wire(self, wire)
        if self.rule == "published" and not isinstance(wire.values, Raw):
            raise ValueError(f"rule published of dsa sends values as they are, got codec {wire.values.name}: use raw")

    @property
    def splits(self) -> bool:  # type: ignore[override]  # depends on the rule
        """Whether it may be called for each piece of the vector by itself."""
        return self.rule == "repaired"

    def exchange(
        self,
        state: NoState,
        acc: torch.Tensor,
        selection: Selection,
        *,
        step: Step,
        overlap: Overlap,
        wire: Wire,
        comm: Comm,
        healthy: bool,
    ) -> Exchanged:
        """Return the sum of all ranks' pairs, divided by the number of ranks."""
        published = self.rule == "published"
        chosen = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        regions = _Regions(comm, wire, acc.numel(), (step.seed, step.index, comm.rank))
        sent, total = regions.add_up(_without_smallest(chosen) if published else chosen)
        row = torch.tensor(
            [total.indices.numel(), chosen.indices.numel(), int(healthy)], dtype=torch.int32, device=acc.device
        )
        rows = comm.gather_rows(row).tolist()  # host sync: list lengths shape the next message
        counts = [row[0] for row in rows]
        dense = 3 * sum(counts) >= acc.numel() if published else regions.shorter_dense(counts, acc.dtype)
        mean, unsent = regions.gather_dense(total) if dense else regions.gather_pairs(total, counts)
        return Exchanged(
            update=(mean,),
            sent=chosen if published else summed([sent, *unsent]),
            counts=tuple(row[1] for row in rows),
            num_updated=mean.indices.numel(),
            healthy=all(row[2] for row in rows),
        )


@dataclass(frozen=True, slots=True)
class _Regions:
    """One region of the vector (numel,) for each rank.

    Attributes:
        key: seeds what is random about encoding.
    """

    comm: Comm
    wire: Wire
    numel: int
    key: Key

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of every rank's region."""
        n = self.comm.world_size
        return tuple(equal_slice(self.numel, n, rank) for rank in range(n))

    def add_up(self, entries: SparseValues) -> tuple[SparseValues, SparseValues]:
        """Send ``entries`` to the owners of their regions.

        Returns:
            the entries as the owners decode them; the sum of all ranks' entries in this rank's region.
        """
        n, spans, indices, values = self.comm.world_size, self.spans, self.wire.indices, self.wire.values
        own_start, own_stop = spans[self.comm.rank]
        own_span, dtype = own_stop - own_start, entries.values.dtype
        ends = torch.tensor([stop for _, stop in spans], dtype=torch.int32, device=entries.indices.device)
        sizes = torch.searchsorted(entries.indices, ends, out_int32=True)
        sizes[1:] -= sizes[:-1].clone()
        asked = self.comm.scatter_parts(sizes, [1] * n, "counts").view(-1)
        leaving, coming = torch.stack([sizes, asked]).tolist()  # host sync: list lengths shape the next message

        places = [
            indices.encode(part - start, stop - start)
            for part, (start, stop) in zip(entries.indices.split(leaving), spans, strict=True)
        ]
        wires = [values.encode(part, (*self.key, rank)) for rank, part in enumerate(entries.values.split(leaving))]
        index_sizes = [indices.num_bytes(count, own_span) for count in coming]
        came = self.comm.scatter_lists(places, index_sizes, "indices")
        lists = [indices.decode(blob, count, own_span) for blob, count in zip(came, coming, strict=True)]
        came = self.comm.scatter_lists(wires, [values.num_bytes(count, dtype) for count in coming], "values")
        sums = [values.decode(blob, count, dtype) for blob, count in zip(came, coming, strict=True)]
        total = summed([SparseValues(part, sum_) for part, sum_ in zip(lists, sums, strict=True)])

        sent = torch.cat([values.decode(blob, count, dtype) for blob, count in zip(wires, leaving, strict=True)])
        return SparseValues(entries.indices, sent), SparseValues(total.indices + own_start, total.values)

    def shorter_dense(self, counts: list[int], dtype: torch.dtype) -> bool:
        """Tell whether the sums, ``counts`` of them in the regions, take fewer bytes as dense regions than as pairs."""
        indices, values, spans = self.wire.indices, self.wire.values, [stop - start for start, stop in self.spans]
        pairs = sum(
            indices.num_bytes(count, span) + values.num_bytes(count, dtype)
            for count, span in zip(counts, spans, strict=True)
        )
        return sum(values.num_bytes(span, dtype) for span in spans) < pairs

    def gather_pairs(self, total: SparseValues, counts: list[int]) -> tuple[SparseValues, list[SparseValues]]:
        """Return the mean of all regions, and what rounding added to this rank's ``total``; pairs travel."""
        selection = Selection(total.indices, spans=self.spans)
        lists = gather_indices(selection, tuple(counts), Overlap.DISJOINT, self.numel, self.wire.indices, self.comm)
        mean, unsent = self._means(total, counts)
        return SparseValues(torch.cat(lists), mean), unsent

    def gather_dense(self, total: SparseValues) -> tuple[SparseValues, list[SparseValues]]:
        """Return the mean of all regions, and what rounding added to this rank's ``total``; every element travels."""
        start, stop = self.spans[self.comm.rank]
        region = total.values.new_zeros(stop - start)
        region[(total.indices - start).long()] = total.values
        places = torch.arange(start, stop, dtype=torch.int32, device=region.device)
        mean, unsent = self._means(SparseValues(places, region), [stop - start for start, stop in self.spans])
        indices = torch.nonzero(mean).view(-1)
        return SparseValues(indices.to(torch.int32), mean[indices]), unsent

    def _means(self, total: SparseValues, counts: list[int]) -> tuple[torch.Tensor, list[SparseValues]]:
        n, codec, dtype = self.comm.world_size, self.wire.values, total.values.dtype
        encoded = codec.encode(total.values / n, (*self.key, n))
        wires = self.comm.gather_lists(encoded, [codec.num_bytes(count, dtype) for count in counts], "values")
        means = [codec.decode(blob, count, dtype) for blob, count in zip(wires, counts, strict=True)]
        if codec.lossless:
            return torch.cat(means), []
        rounding = n * means[self.comm.rank] - total.values
        return torch.cat(means), [SparseValues(total.indices, rounding)]


def _without_smallest(entries: SparseValues) -> SparseValues:
    """Return the entries whose magnitude is strictly above the smallest among them."""
    if not entries.indices.numel():
        return entries
    magnitudes = entries.values.abs()
    keep = magnitudes > magnitudes.min()
    return SparseValues(entries.indices[keep], entries.values[keep])
