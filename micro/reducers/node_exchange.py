"""What the ranks of a node send each other: gradients before the exchange between nodes, updates after it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from micro.comm import Comm, Levels
from micro.flat import Layout
from micro.kernels.reference import first_nonfinite
from micro.nonfinite import Finding
from micro.reducers.node_shards import NodeShards
from micro.reducers.outcome import Outcome
from micro.requests import AllGather, AllGatherLists, AllToAll, Reduction
from micro.traffic import COUNT_BYTES, Bucket, Call, Calls

INDEX_BYTES = 4
NUM_FACTS = 4  # of a shard in the header of a node, beside a count for each node


@dataclass(frozen=True, slots=True)
class NodeHeader:
    """What the ranks of a node know of each other's exchange.

    Attributes:
        is_finite: whether the gradients of all ranks, and all updates, are finite.
        num_updated: how many elements of each shard are not zero.
        target_count, global_count: sums over the shards.
        counts: how many indices each rank of the whole group chose.
    """

    is_finite: bool
    num_updated: tuple[int, ...]
    target_count: int
    global_count: int
    counts: tuple[int, ...]


def node_mean(grad: Tensor, shards: NodeShards, within: Comm) -> Reduction[Tensor]:
    """Return the mean over the node of this rank's shard, in single precision at least; ``grad`` (numel,) stays."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    sizes, own = list(shards.numels), shards.numels[within.rank]
    coming = [own] * within.world_size
    received: Tensor = yield AllToAll(mine=shards.apart(grad), sizes=sizes, received=coming, kind="values")
    return received.view(within.world_size, own).sum(0, dtype=wide).div_(within.world_size)


def share_header(outcome: Outcome | None, indices: Tensor, levels: Levels) -> Reduction[NodeHeader]:
    """Tell the ranks of a node what came of each shard.

    Args:
        outcome: of this rank's shard; None where it is empty.
        indices: (k,) where its update is not zero.
    """
    nodes = levels.between.world_size
    row = [1, 0, 0, 0, *(0 for _ in range(nodes))]
    if outcome is not None:
        stats = outcome.stats
        row = [int(not outcome.findings), indices.numel(), stats.target_count, stats.global_count, *stats.counts]
    mine = torch.tensor(row, dtype=torch.int32, device=indices.device)
    gathered = yield AllGather(mine=mine)
    rows = gathered.tolist()  # host sync: list lengths shape the next message
    return NodeHeader(
        is_finite=all(row[0] for row in rows),
        num_updated=tuple(row[1] for row in rows),
        target_count=sum(row[2] for row in rows),
        global_count=sum(row[3] for row in rows),
        counts=tuple(row[4 + node] for node in range(nodes) for row in rows),
    )


def gather_update_(
    grad: Tensor, update: Tensor, indices: Tensor, header: NodeHeader, shards: NodeShards
) -> Reduction[None]:
    """Make ``grad`` (numel,) the update of all shards, the same bits on all ranks.

    Pairs are sent where they are shorter than whole shards.

    Args:
        update: of this rank's shard, in the dtype of ``grad``.
        indices: (k,) where it is not zero.
    """
    if sum(header.num_updated) * (INDEX_BYTES + update.element_size()) >= grad.nbytes:
        whole = yield AllGatherLists(mine=update, counts=shards.numels, kind="values")
        grad.copy_(shards.together(whole.split(list(shards.numels))))
        return
    counts = list(header.num_updated)
    places = yield AllGatherLists(mine=indices.to(torch.int32), counts=counts, kind="indices")
    values = yield AllGatherLists(mine=update[indices], counts=counts, kind="values")
    grad.zero_()
    for place, (found, sent) in enumerate(zip(places.split(counts), values.split(counts), strict=True)):
        grad[shards.positions(place, found)] = sent


def find(grad: Tensor, outcome: Outcome | None, layout: Layout) -> Reduction[Finding]:
    """Return where a step of which any shard was not finite is bad: in gradients, or in sums of finite ones.

    All ranks call it together.

    Args:
        grad: (numel,) of this rank, as it was given.
        outcome: of this rank's shard; None where it is empty.
        layout: of the vector.
    """
    own, numel = first_nonfinite(grad), layout.numel
    findings = outcome.findings if outcome else ()
    places = [(f.layout, f.in_gradient if f.in_update is None else f.in_update) for f in findings]
    named = [layout.names.index(shard.name_at(place)) for shard, place in places if place is not None]
    in_sum = layout.offsets[named[0]] if named else numel
    mine = torch.tensor([int(own is not None), in_sum], dtype=torch.int32, device=grad.device)
    gathered = yield AllGather(mine=mine)
    rows = gathered.tolist()  # host sync: the step is taken back
    if any(row[0] for row in rows):
        return Finding(layout, own)
    return Finding(layout, None, min(row[1] for row in rows))


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
