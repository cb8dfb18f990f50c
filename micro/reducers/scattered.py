"""A sparse reduction of which each rank keeps its own shard alone: what a reduce-scatter does, compressed.

Ranks send an entry only to the rank whose shard it is in, so that nothing travels twice as in an all-reduce.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from micro import kernels
from micro.codecs import coding
from micro.comm.ranks import Comm
from micro.comm.requests import AllToAll, Reduction
from micro.exchanges.base import Transport
from micro.exchanges.gather import Gather
from micro.exchanges.gathering import gather_counts, gather_indices
from micro.exchanges.regions import add_up
from micro.exchanges.union import Union
from micro.reducers.base import BucketState, Reducer
from micro.reducers.sparse import SparseReducer
from micro.reducers.stats import Start, StepStats, stats_of
from micro.selectors.base import Selector, Traits
from micro.selectors.everything import Everything
from micro.values.finite import index_of, is_finite_by
from micro.values.partition import equal_slices
from micro.values.sparse import AllValues, Overlap, Selection, SparseValues, Step


@dataclass(frozen=True, slots=True)
class Scattered:
    """What a rank gets.

    Attributes:
        shard: (numel / world_size,) the mean over the ranks of what they sent of this rank's shard.
        stats: of the step; ``global_count`` is of this shard alone.
        first_bad: index of this rank's first NaN or Inf, which is kept out of the residual; None where there is none.
    """

    shard: Tensor
    stats: StepStats
    first_bad: int | None


def check_scatters(reducer: Reducer) -> SparseReducer:
    """Return the reducer, or raise ValueError where its parts need the update of the whole vector."""
    if not isinstance(reducer, SparseReducer):
        raise ValueError(f"within FSDP a SparseReducer works, got {reducer.full_name}")
    exchange = reducer.exchange
    if not isinstance(exchange, Union) and not (isinstance(exchange, Gather) and exchange.rule is None):
        raise ValueError(f"within FSDP the exchange is union, or gather without a rule, got {exchange.full_name}")
    if type(reducer.selector).observe is not Selector.observe:
        given = f"selector {reducer.selector.full_name}"
        raise ValueError(f"within FSDP no rank has the whole update, which a part of this method follows: {given}")
    return reducer


def reduce_to_shards(reducer: SparseReducer, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Scattered]:
    """Return this rank's shard of the mean update; what was not sent stays in the state's residual.

    The sum over the ranks of their accumulators is the sum of their residuals plus world_size times the update, of
    which the ranks' shards are the parts.

    Args:
        grad: (numel,) of this rank, whose length is a multiple of the number of ranks; used up.
    """
    start, numel, n = Start.of(comm, grad.device), grad.numel(), comm.world_size
    wanted = yield from reducer.density_policy.target(state.density, grad, state.step, state.layout, comm)
    target = reducer.selector.effective_target(wanted, state.layout)
    at_work = reducer.at(target.density)
    acc, bad = reducer.feedback.accumulate_(state.memory, grad, world_size=n)
    sums = kernels.sums_of(acc) if Traits.WANTS_SUMS in at_work.selector.traits else None
    layer_densities, is_finite = target.layer_densities, is_finite_by(bad, numel)
    step = Step(state.step, target.count, reducer.seed, state.layout, layer_densities, sums, is_finite)
    transport = Transport(comm=comm, step=step, overlap=at_work.selector.overlap, wire=reducer.wire)
    selection, threshold, scale = None, None, 1.0
    if not isinstance(at_work.selector, Everything):
        chosen = state.selector if at_work is reducer else at_work.selector.start()
        selection = yield from at_work.selector.select(chosen, acc, step, comm)
        threshold, scale = selection.threshold, selection.scale
    select = start.spans(comm, grad.device).rest
    if selection is None:
        counts, sent, shard = (numel,) * n, *(yield from _send_values(acc, None, transport))
    elif isinstance(at_work.exchange, Union):
        counts = yield from gather_counts(selection)
        places = yield from _places(selection, counts, numel, transport)
        sent, shard = yield from _send_values(acc, places, transport)
    else:
        counts = yield from gather_counts(selection)
        ascending = selection.indices
        entries = SparseValues(ascending, kernels.gather(acc, ascending))
        sent, received = yield from add_up(entries, tuple(equal_slices(numel, n)), transport)
        shard = acc.new_zeros(numel // n)
        shard[received.indices.long() - comm.rank * shard.numel()] = received.values
    shard.mul_(scale / n)
    reducer.feedback.settle_(state.memory, sent, (), scale)
    state.step += 1
    stats = stats_of(
        start,
        comm,
        grad.device,
        step=step.index,
        numel=numel,
        rule=reducer.rule_name,
        target_density=target.density,
        target_count=target.count,
        counts=counts,
        global_count=int(torch.count_nonzero(shard)),  # host sync: the record
        threshold=threshold,
        select=select,
    )
    return Scattered(shard, stats, index_of(bad, numel))


def _places(selection: Selection, counts: tuple[int, ...], numel: int, transport: Transport) -> Reduction[Tensor]:
    """Return the ascending indices (m,) that any rank chose."""
    indices = yield from gather_indices(selection, counts, numel, transport)
    is_one_list = transport.overlap in (Overlap.SAME, Overlap.LEADER) or transport.comm.world_size == 1
    return indices if is_one_list else kernels.distinct(indices, numel)


def _send_values(acc: Tensor, places: Tensor | None, transport: Transport) -> Reduction[tuple[SparseValues, Tensor]]:
    """Send the values at ``places``, which all ranks know, each to the rank of its shard; all values where it is None.

    Returns:
        what this rank sent, as decoded; its own values, which need no code, count as sent whole.
        the sums (numel / world_size,) in this rank's shard, zero elsewhere.
    """
    comm, codec, numel = transport.comm, transport.wire.values, acc.numel()
    n, rank, size = comm.world_size, comm.rank, numel // comm.world_size
    values = acc.clone() if places is None else kernels.gather(acc, places)
    counts = [size] * n
    if places is not None:
        ends = torch.arange(size, numel + 1, size, dtype=torch.int32, device=places.device)
        spots = [0, *torch.searchsorted(places, ends).tolist()]  # host sync: list lengths shape the message
        counts = [stop - start for start, stop in pairwise(spots)]
    parts = list(values.split(counts))
    wires = [coding.encode(codec, part, (*transport.key, to)) for to, part in enumerate(parts) if to != rank]
    sizes = [0 if to == rank else codec.num_bytes(count, acc.dtype) for to, count in enumerate(counts)]
    own = codec.num_bytes(counts[rank], acc.dtype)
    coming = [0 if source == rank else own for source in range(n)]
    leaving = torch.cat(wires) if wires else acc.new_empty(0, dtype=torch.uint8)
    arrived = yield AllToAll(mine=leaving, sizes=sizes, received=coming, kind="values")
    total = parts[rank].clone()
    for wire in arrived.view(n - 1, own) if n > 1 else ():
        total += coding.decode(codec, wire, counts[rank], acc.dtype)
    if not codec.lossless:
        for wire, to in zip(wires, (to for to in range(n) if to != rank), strict=True):
            parts[to].copy_(coding.decode(codec, wire, counts[to], acc.dtype))
    if places is None:
        return AllValues(values), total
    start = sum(counts[:rank])
    shard = acc.new_zeros(size)
    shard[places[start : start + counts[rank]].long() - rank * size] = total
    return SparseValues(places, values), shard
