"""Messages within a node for two levels: gradients before the exchange between nodes, updates after it.

Each rank of a node owns a shard of every vector: a slice of each parameter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from micro.comm.levels import Levels
from micro.comm.ranks import Comm
from micro.comm.requests import AllGather, AllGatherLists, AllToAll, Reduction, known
from micro.kernels.reference import first_nonfinite
from micro.predicted_traffic import COUNT_BYTES, Bucket, Call, Calls
from micro.reducers.outcome import Outcome
from micro.reducers.shares import Share
from micro.values.finite import on_device
from micro.values.flat import Layout
from micro.values.nonfinite import Finding
from micro.values.sparse import equal_slice

INDEX_BYTES = 4
NUM_FACTS = 6  # of a shard in the header of a node, beside a count for each node

Shards = tuple[Share | None, ...]
"""The shard of each rank of a node; one of a vector with few elements may be empty."""


def node_shards(layout: Layout, ranks_per_node: int) -> Shards:
    """Return the shards of a vector; of a parameter with fewer elements than ranks some get nothing."""
    return tuple(
        Share.of(layout, [equal_slice(numel, ranks_per_node, place) for numel in layout.numels])
        for place in range(ranks_per_node)
    )


def numels_of(shards: Shards) -> list[int]:
    """Return the number of elements of each shard."""
    return [shard.layout.numel if shard else 0 for shard in shards]


@dataclass(frozen=True, slots=True)
class NodeHeader:
    """What the ranks of a node know of each other's exchange.

    Attributes:
        is_finite: whether the gradients of all ranks, and all updates, are finite.
        num_updated: how many elements of each shard are not zero.
        target_count, global_count, dense_numel, num_choices: sums over the shards.
        counts: how many indices each rank of the whole group chose.
    """

    is_finite: bool
    num_updated: list[int]
    target_count: int
    global_count: int
    dense_numel: int
    num_choices: int
    counts: tuple[int, ...]


def node_mean(grad: Tensor, shards: Shards, within: Comm) -> Reduction[Tensor]:
    """Return the mean over the node of this rank's shard, in single precision at least; ``grad`` (numel,) stays."""
    wide, sizes = torch.promote_types(grad.dtype, torch.float32), numels_of(shards)
    own = sizes[within.rank]
    apart = torch.cat([grad[run] for shard in shards if shard for run in shard.runs])
    coming = [own] * within.world_size
    received: Tensor = yield AllToAll(mine=apart, sizes=sizes, received=coming, kind="values")
    return received.view(within.world_size, own).sum(0, dtype=wide).div_(within.world_size)


def share_header(
    outcome: Outcome | None, num_updated: int, levels: Levels, device: torch.device
) -> Reduction[NodeHeader]:
    """Return what came of each shard of the node.

    Args:
        outcome: of this rank's shard; None where it is empty.
        num_updated: elements of its update that are not zero.
    """
    nodes = levels.between.world_size
    row = [1] + [0] * (NUM_FACTS - 1 + nodes)
    if outcome is not None:
        stats = outcome.stats
        facts = stats.target_count, stats.global_count, stats.dense_numel, stats.num_choices
        row = [int(not outcome.findings), num_updated, *facts, *stats.counts]
    (gathered,) = yield from known((yield AllGather(mine=on_device(row, torch.int32, device))))  # lengths of lists
    finite, updated, targets, globally, denses, choices, *counts = zip(*gathered.tolist(), strict=True)
    every_count = tuple(count for of_node in counts for count in of_node)
    sums = sum(targets), sum(globally), sum(denses), sum(choices)
    return NodeHeader(all(finite), list(updated), *sums, every_count)


def gather_update_(
    grad: Tensor, update: Tensor, indices: Tensor, header: NodeHeader, shards: Shards
) -> Reduction[None]:
    """Make ``grad`` (numel,) the update of all shards, the same bits on all ranks.

    Pairs are sent where they are shorter than whole shards.

    Args:
        update: of this rank's shard, in the dtype of ``grad``.
        indices: (k,) where it is not zero.
    """
    counts = header.num_updated
    if sum(counts) * (INDEX_BYTES + update.element_size()) >= grad.nbytes:
        sizes = numels_of(shards)
        whole = yield AllGatherLists(mine=update, counts=sizes, kind="values")
        for shard, piece in zip(shards, whole.split(sizes), strict=True):
            if shard is not None:
                shard.put_back_(grad, piece)
        return
    places = yield AllGatherLists(mine=indices.to(torch.int32), counts=counts, kind="indices")
    values = yield AllGatherLists(mine=update[indices], counts=counts, kind="values")
    grad.zero_()
    for shard, found, sent in zip(shards, places.split(counts), values.split(counts), strict=True):
        if shard is not None:
            grad[shard.positions(found)] = sent


def find(grad: Tensor, outcome: Outcome | None, layout: Layout) -> Reduction[Finding]:
    """Return where a step of which any shard was not finite is bad: in gradients, or in sums of finite ones.

    All ranks call it together.

    Args:
        grad: (numel,) of this rank, as it was given.
        outcome: of this rank's shard; None where it is empty.
        layout: of the vector.
    """
    own, findings = first_nonfinite(grad), outcome.findings if outcome else ()
    places = [(f.layout, f.in_gradient if f.in_update is None else f.in_update) for f in findings]
    named = [layout.names.index(shard.name_at(place)) for shard, place in places if place is not None]
    in_sum = layout.offsets[named[0]] if named else layout.numel
    gathered = yield AllGather(mine=torch.tensor([int(own is not None), in_sum], dtype=torch.int32, device=grad.device))
    in_gradients, in_sums = zip(*gathered.tolist(), strict=True)  # host sync: the step is taken back
    return Finding(layout, own) if any(in_gradients) else Finding(layout, None, min(in_sums))


def local_calls(bucket: Bucket, ranks_per_node: int, num_updated: float) -> Calls:
    """Return what the ranks of a node send each other: gradients, the header, and updates, as pairs or whole."""
    if ranks_per_node == 1:
        return ()
    share, width = bucket.numel / ranks_per_node, bucket.element_bytes
    gradients: Call = ("scatter", (bucket.numel - share) * width)
    header: Call = ("gather_rows", COUNT_BYTES * (NUM_FACTS + bucket.world_size // ranks_per_node))
    updated = round(num_updated)
    if updated * (INDEX_BYTES + width) >= bucket.numel * width:
        return gradients, header, ("gather_lists", share * width)
    pairs: Calls = tuple(("gather_lists", size * updated / ranks_per_node) for size in (INDEX_BYTES, width))
    return gradients, header, *pairs
