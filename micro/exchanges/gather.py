"""Gather: every rank sends its own pairs of index and value to all others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from micro import kernels
from micro.codecs import coding
from micro.comm.requests import Once, Reduction
from micro.exchanges.base import (
    Exchange,
    NoState,
    Transport,
    gather_header,
    gather_indices,
    gather_values,
    header_call,
    indices_calls,
    values_call,
)
from micro.exchanges.predicted_traffic import Choice
from micro.kernels.reference import are_first
from micro.predicted_traffic import Calls
from micro.values.sparse import Exchanged, Overlap, Selection, SparseValues

GatherRule = Literal["published", "senders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(Exchange[NoState]):
    """Gather (index, value) pairs; an index gets the sum of those ranks that chose it, divided by all ranks.

    Only a rank's own choice leaves its residual. Bytes sent per rank: (n-1) (4 + w) k_r with int32 indices (none where
    all ranks hold the same) and values of w bytes, and 8 (n-1) for the count and the finite flag.

    Args:
        rule: None: what is sent is applied, so that mass is conserved. 'published': public code of the scheme and of
            SIDCo: the N pairs are cut into world_size equal slices, as if every rank had sent as many; the
            N mod world_size last are dropped, and of two pairs of one index in one slice the first. 'senders': public
            code of SparseLoCo and DeMo: an index gets the mean over those ranks that chose it. What one of n ranks
            alone has sent is applied n times as large, so that updates are the larger the less choices agree.

    Source: the allgather scheme of sparse SGD, e.g. Shi et al., arXiv 1911.08772; Abdelmoniem et al., SIDCo, MLSys
    2021, arXiv 2101.10761; Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706; Peng et al., DeMo, 2024, arXiv 2411.19870.
    Differences: int32 indices, lists padded at most by a quarter, added up in rank order so that all ranks get the same
    bits; no median of norms over ranks, to which SparseLoCo's code scales the largest down.

    Raises:
        ValueError: no such rule.
    """

    rule: GatherRule | None = None
    name: ClassVar[str] = "gather"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT, Overlap.SAME})
    sends_to_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rule is not None and self.rule not in get_args(GatherRule):
            allowed = ", ".join(get_args(GatherRule))
            raise ValueError(f"rule of {self.name} must be {allowed} or left out, got '{self.rule}'")

    def exchange(self, state: NoState, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Return the sum of all ranks' pairs, divided by the number of ranks."""
        overlap, codec, n = transport.overlap, transport.wire.values, transport.comm.world_size
        is_finite = transport.step.is_finite
        header = yield from gather_header(selection.indices, is_finite=is_finite, counts=selection.counts)
        counts = header.counts
        encoded = coding.encode(codec, kernels.gather(acc, selection.indices), transport.key)
        indices = yield from gather_indices(selection, counts, acc.numel(), transport)
        values = yield from gather_values(encoded, counts, codec, acc.dtype)
        if overlap is Overlap.SAME or n == 1:  # the values of all ranks are of one list
            total = yield Once(work=lambda: reduce(torch.add, values.split(list(counts))))
            parts: tuple[SparseValues, ...] = (SparseValues(indices, total / n),)
        else:
            parts = yield Once(work=lambda: self._parts_of_update(SparseValues(indices, values / n), counts, overlap))
        if len(parts) == 1 or overlap is Overlap.DISJOINT:
            num_updated = sum(part.indices.numel() for part in parts)
        else:
            num_updated = yield Once(work=lambda: _num_distinct(parts, acc.numel()))
        sent = SparseValues(selection.indices, coding.decode(codec, encoded, selection.indices.numel(), acc.dtype))
        return Exchanged(update=parts, sent=sent, counts=counts, num_updated=num_updated, is_finite=header.is_finite)

    def _parts_of_update(
        self, pairs: SparseValues, counts: tuple[int, ...], overlap: Overlap
    ) -> tuple[SparseValues, ...]:
        """Return the parts whose sum is the update.

        Args:
            pairs: what all ranks sent, divided by the number of ranks, in rank order; ``counts`` of them are of each.
        """
        if self.rule == "published":
            return tuple(_equal_slices(pairs, len(counts)))
        if self.rule == "senders":
            pairs = SparseValues(pairs.indices, pairs.values * (len(counts) / _senders(pairs.indices)))
        return (pairs,) if overlap is Overlap.DISJOINT else pairs.split(counts)

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return the header, indices and values; see Exchange."""
        return (header_call(), *indices_calls(choice), values_call(choice)), choice.total


def _num_distinct(parts: Sequence[SparseValues], numel: int) -> int | Tensor:
    """Return how many indices differ; an accelerator is not read."""
    indices = torch.cat([part.indices for part in parts])
    return kernels.distinct(indices, numel).numel() if indices.is_cpu else are_first(indices.sort().values).sum()


def _equal_slices(pairs: SparseValues, world_size: int) -> Iterator[SparseValues]:
    """Yield the pairs of all ranks cut into as many equal slices, the last of an index's pairs in each slice."""
    size = pairs.indices.numel() // world_size
    places = torch.arange(size, device=pairs.indices.device)
    for start in (size * part for part in range(world_size)):
        unique, group = torch.unique(pairs.indices[start : start + size], return_inverse=True)
        last = places.new_zeros(unique.numel()).scatter_reduce_(0, group, places, "amax")
        yield SparseValues(unique, pairs.values[start + last])


def _senders(indices: Tensor) -> Tensor:
    """Return (m,) int64 how often each of ``indices`` (m,) is among them; an accelerator is not read."""
    if not indices.numel():
        return indices.to(torch.int64)
    ordered, places = indices.sort()
    group = are_first(ordered).cumsum(0) - 1
    sizes = torch.zeros_like(places).index_add_(0, group, torch.ones_like(places))
    return torch.empty_like(places).scatter_(0, places, sizes[group])
