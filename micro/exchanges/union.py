"""The exchange union: gather all chosen indices, then average all ranks' values at each of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm.requests import AllReduce, Once, Reduction, known
from micro.exchanges.averaging import mean_calls, mean_encoded_
from micro.exchanges.base import (
    Exchange,
    NoState,
    Transport,
    counts_calls,
    gather_counts,
    gather_indices,
    indices_calls,
)
from micro.exchanges.predicted_traffic import Choice
from micro.kernels.reference import are_first, places_of
from micro.predicted_traffic import Calls
from micro.values.finite import Finite, is_zero, with_count
from micro.values.sparse import Exchanged, Overlap, Selection, SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Union(Exchange[NoState]):
    """Gather the indices of all ranks, then all-reduce the values of every rank at their union.

    Each rank sends its value at every index that any rank chose, so the update has the mean of all accumulators there.
    Bytes sent per rank: 4 (n-1) k_r for indices as int32 (none if all ranks hold the same, a broadcast if one rank
    chose), and 2 w (K+1) (n-1)/n for values of w bytes, K distinct indices and the finite flag. Encoded values are
    scattered and gathered instead (`mean_of`).

    Source: the exchange of Yoon and Oh's public code, HiPC 2023, arXiv 2310.00967. Differences: int32 indices, lists
    padded only if their lengths are similar.
    """

    name: ClassVar[str] = "union"
    accepts: ClassVar[frozenset[Overlap]] = frozenset(Overlap)

    def exchange(self, state: NoState, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Return the mean of all ranks at the union of what they chose."""
        numel = acc.numel()
        counts = yield from gather_counts(selection)
        indices = yield from gather_indices(selection, counts, numel, transport)
        if transport.overlap is Overlap.ANY and transport.comm.world_size > 1:
            indices = yield from distinct(indices, numel)
        mean, sent, is_finite = yield from mean_of(kernels.gather(acc, indices), transport)
        return Exchanged(
            update=(SparseValues(indices, mean),),
            sent=SparseValues(indices, sent),
            counts=counts,
            num_updated=indices.numel(),
            is_finite=is_finite,
        )

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Predict the messages of counts, indices and the mean of their values; see Exchange."""
        mean = mean_calls(choice.wire.values, choice.total, choice.world_size, choice.dtype)
        return (*counts_calls(choice), *indices_calls(choice), *mean), choice.total


def mean_of(values: Tensor, transport: Transport) -> Reduction[tuple[Tensor, Tensor, Finite]]:
    """Average ``values`` (k,), one entry per shared index, over the ranks.

    The finite flag is sent too: one more number in an all-reduce, one byte with encoded values.

    Returns:
        the mean (k,), equal bit for bit on all ranks; what this rank sent as decoded (k,); whether all were finite.
    """
    if transport.wire.values.lossless:
        total = yield AllReduce(mine=with_count(values, transport.step.is_finite))
        mean = total.div_(transport.comm.world_size)
        return mean[:-1], values, is_zero(mean[-1])
    rest, mean = torch.empty_like(values), torch.empty_like(values)
    is_finite, _, _ = yield from mean_encoded_(values, transport, rest=rest, mean=mean)
    return mean, values - rest, is_finite


def distinct(indices: Tensor, numel: int) -> Reduction[Tensor]:
    """Return the distinct indices (`micro.kernels.distinct`); on an accelerator, buckets share the read of lengths."""
    if indices.is_cpu:
        found: Tensor = yield Once(work=lambda: kernels.distinct(indices, numel))
        return found
    ordered: Tensor = yield Once(work=lambda: indices.sort().values)
    is_first = are_first(ordered)
    (count,) = yield from known(is_first.sum())
    return ordered.index_select(0, places_of(is_first, count))
