"""The exchange gather: every rank sends its (index, value) pairs to all others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from micro import kernels
from micro.codecs import coding
from micro.comm.requests import Once, Reduction
from micro.exchanges.base import Exchange, NoState, Transport, gather_indices, gather_values, indices_calls, values_call
from micro.exchanges.header import gather_header, header_call
from micro.exchanges.predicted_traffic import Choice
from micro.kernels.reference import are_first
from micro.predicted_traffic import Calls
from micro.values.sparse import Exchanged, Overlap, Selection, SparseValues

GatherRule = Literal["published", "senders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(Exchange[NoState]):
    """All-gather (index, value) pairs; an index gets the sum over ranks that chose it, divided by world_size.

    A rank removes only its own choice from its residual. Bytes sent per rank: (n-1) (4 + w) k_r with int32 indices (no
    index bytes if all ranks hold the same) and values of w bytes, plus 8 (n-1) for the count and the finite flag.

    Args:
        rule: None: everything that is sent is applied, so mass is conserved. 'published', as in public code of the
            scheme and of SIDCo: the N pairs are cut into world_size equal slices, as if every rank had sent as many;
            the last N mod world_size are dropped, and so is the first of two pairs with the same index in one slice.
            'senders', as in public code of SparseLoCo and DeMo: an index gets the mean over the ranks that chose it, so
            updates grow the less the choices agree, up to n times.

    Source: the allgather scheme of sparse SGD, e.g. Shi et al., arXiv 1911.08772; Abdelmoniem et al., SIDCo, MLSys
    2021, arXiv 2101.10761; Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706; Peng et al., DeMo, 2024, arXiv 2411.19870.
    Differences: int32 indices; lists padded by at most a quarter; summed in rank order, so all ranks get the same bits;
    no scaling to the median norm of the ranks (SparseLoCo's code).

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
        if overlap is Overlap.SAME or n == 1:  # all ranks' values have the same indices
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
            pairs: what all ranks sent, in rank order, divided by the number of ranks; ``counts``: pairs per rank.
        """
        if self.rule == "published":
            return tuple(_equal_slices(pairs, len(counts)))
        if self.rule == "senders":
            pairs = SparseValues(pairs.indices, pairs.values * (len(counts) / _senders(pairs.indices)))
        return (pairs,) if overlap is Overlap.DISJOINT else pairs.split(counts)

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Predict the messages of header, indices and values; see Exchange."""
        return (header_call(), *indices_calls(choice), values_call(choice)), choice.total


def _num_distinct(parts: Sequence[SparseValues], numel: int) -> int | Tensor:
    """Return the number of distinct indices, without waiting for an accelerator."""
    indices = torch.cat([part.indices for part in parts])
    return kernels.distinct(indices, numel).numel() if indices.is_cpu else are_first(indices.sort().values).sum()


def _equal_slices(pairs: SparseValues, world_size: int) -> Iterator[SparseValues]:
    """Cut all pairs into world_size equal slices; yield each slice with only the last pair of each index."""
    size = pairs.indices.numel() // world_size
    places = torch.arange(size, device=pairs.indices.device)
    for start in (size * part for part in range(world_size)):
        unique, group = torch.unique(pairs.indices[start : start + size], return_inverse=True)
        last = places.new_zeros(unique.numel()).scatter_reduce_(0, group, places, "amax")
        yield SparseValues(unique, pairs.values[start + last])


def _senders(indices: Tensor) -> Tensor:
    """Return (m,) int64 how often each of ``indices`` (m,) occurs, without waiting for an accelerator."""
    if not indices.numel():
        return indices.to(torch.int64)
    ordered, places = indices.sort()
    group = are_first(ordered).cumsum(0) - 1
    sizes = torch.zeros_like(places).index_add_(0, group, torch.ones_like(places))
    return torch.empty_like(places).scatter_(0, places, sizes[group])
