"""The exchange dsa: each rank sums one region of the vector; then the sums are gathered, sparse or dense."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import coding
from micro.comm.requests import Once, Reduction
from micro.exchanges.base import Exchange, Needs, NoState, Transport, Wire, count_of, gather_indices, gather_values
from micro.exchanges.header import gather_header, header_call
from micro.exchanges.predicted_traffic import Choice
from micro.exchanges.regions import add_up, add_up_calls
from micro.parts import Rule, check_rule
from micro.predicted_traffic import Calls
from micro.values.sparse import Exchanged, Overlap, Selection, SparseValues, equal_slices, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class DSA(Exchange[NoState]):
    """Send every entry to the rank that owns its region, sum there, and gather the sums: as pairs, or dense if shorter.

    The vector has world_size equal regions. As with `Gather`, an index gets the sum over the ranks that chose it,
    divided by the number of all ranks; but its sum is sent only once. Rounding errors of a codec stay in the residual
    of the rank that rounds.

    Bytes sent, with int32 indices and values of w bytes: (4 + w) for each of a rank's entries in another rank's
    region; then (n-1) (4 + w) for each distinct index in its own region, or (n-1) w for each element of it; 16 (n-1)
    for lengths, counts and the finite flag.

    Args:
        rule: 'repaired', or 'published': the baseline TopkDSA in the public code of Li and Hoefler, Ok-Topk, PPoPP
            2022, arXiv 2201.07598. There a rank sends only the entries strictly above the smallest magnitude that it
            chose, but removes all of them from its residual: the smallest entry and its ties are lost in every step.
            The sums are sent dense if the update has at least numel / 3 indices.

    Source: the dynamic sparse all-reduce, split and gather, of Renggli et al., SparCML, SC 2019, arXiv 1802.08021.
    Differences: the sums are sent dense if that takes fewer bytes in all. As published: int32 indices (code: float32);
    regions differ by at most one element (code: the last takes the remainder), also with fewer elements than ranks
    (code: division by zero).

    Raises:
        ValueError: no such rule; a codec for values under rule 'published', when a reducer is composed.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "dsa"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})

    def __post_init__(self) -> None:
        check_rule(self)

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # depends on the rule
        """As published it sends unencoded values."""
        return Needs.NO_MOMENTUM_WITH_CODES if self.rule == "repaired" else Needs.RAW_VALUES

    def exchange(self, state: NoState, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Return the sum of all ranks' pairs, divided by the number of ranks."""
        n, rank, wire, dtype = transport.comm.world_size, transport.comm.rank, transport.wire, acc.dtype
        regions = equal_slices(acc.numel(), n)
        sizes = [stop - start for start, stop in regions]
        chosen = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        decoded, total = yield from add_up(self._entries_to_send(chosen), regions, transport)
        is_finite = transport.step.is_finite
        header = yield from gather_header(selection.indices, is_finite=is_finite, extra=count_of(total.indices))
        counts = [count for (count,) in header.extras]
        is_dense = yield Once(work=lambda: self._is_dense(sizes, counts, wire, dtype))
        if is_dense:
            counts, total = sizes, _to_dense(total, *regions[rank])
        else:
            spans = Selection(total.indices, spans=tuple(regions))
            indices = yield from gather_indices(spans, tuple(counts), acc.numel(), transport)
        encoded = coding.encode(wire.values, total.values / n, (*transport.key, n))
        means = yield from gather_values(encoded, counts, wire.values, dtype)
        unsent = []
        if not wire.values.lossless:  # the encoding error of this rank's sums
            unsent = [SparseValues(total.indices, n * means.split(counts)[rank] - total.values)]
        update = (yield Once(work=lambda: _without_zeros(means))) if is_dense else SparseValues(indices, means)
        return Exchanged(
            update=(update,),
            sent=summed([decoded, *unsent]) if self.rule == "repaired" else chosen,
            counts=header.counts,
            num_updated=update.indices.numel(),
            is_finite=header.is_finite,
        )

    def _entries_to_send(self, chosen: SparseValues) -> SparseValues:
        """Return the chosen entries that a rank sends."""
        if self.rule == "repaired" or not chosen.indices.numel():
            return chosen
        magnitudes = chosen.values.abs()
        return chosen.where(magnitudes > magnitudes.min())

    def _is_dense(self, sizes: Sequence[int], counts: Sequence[int], wire: Wire, dtype: torch.dtype) -> bool:
        """Return whether the sums are sent dense, from the regions' numbers of elements and sums."""
        if self.rule == "published":
            return 3 * sum(counts) >= sum(sizes)
        pairs = sum(
            wire.indices.num_bytes(count, size) + wire.values.num_bytes(count, dtype)
            for count, size in zip(counts, sizes, strict=True)
        )
        return sum(wire.values.num_bytes(size, dtype) for size in sizes) < pairs

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Predict the messages of entries, header and sums; see Exchange."""
        n, held, size = choice.world_size, choice.total / choice.world_size, choice.numel / choice.world_size
        sums: Calls = (("gather_lists", choice.indices(held, size)), ("gather_lists", choice.values(held)))
        if self._is_dense([round(size)] * n, [round(held)] * n, choice.wire, choice.dtype):
            sums = (("gather_lists", choice.values(size)),)
        entries = choice.chosen - (self.rule == "published")  # that rule does not send the smallest
        return (*add_up_calls(choice, entries), header_call(num_extras=1), *sums), choice.total


def _to_dense(total: SparseValues, start: int, stop: int) -> SparseValues:
    """Return the region [start, stop) as a dense vector, zero where there is no sum."""
    region = total.values.new_zeros(stop - start)
    region[(total.indices - start).long()] = total.values
    return SparseValues(torch.arange(start, stop, dtype=torch.int32, device=region.device), region)


def _without_zeros(vector: Tensor) -> SparseValues:
    """Return the entries of ``vector`` (numel,) that are not zero."""
    indices = torch.nonzero(vector).view(-1)
    return SparseValues(indices.to(torch.int32), vector[indices])
