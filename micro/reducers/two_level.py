"""The reducer two_level: a dense mean within each node, any method between nodes."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm.levels import levels_of
from micro.comm.ranks import Comm, Traffic
from micro.comm.requests import Reduction, over
from micro.predicted_traffic import Bucket, Volume
from micro.reducers.base import BucketState
from micro.reducers.node_exchange import (
    NodeHeader,
    find,
    gather_update_,
    local_calls,
    node_mean,
    node_shards,
    share_header,
)
from micro.reducers.outcome import Outcome, rounded, rounding
from micro.reducers.powersgd import PowerSGD
from micro.reducers.shares import Share, ShareReducer, ShareState
from micro.reducers.stats import Start, stats_of
from micro.reducers.wrapping import WrappingReducer, innermost
from micro.values.flat import Layout
from micro.values.sparse import SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevel(ShareReducer):
    """Average densely within a node, where links are fast, and with ``reducer`` between nodes.

    Ranks are numbered node by node, as in torchrun. Each rank of a node owns a slice of every parameter, its shard. A
    step has three parts. First, the node's gradients are summed, each shard on its owner. Then each rank exchanges its
    shard with the ranks of equal local rank on other nodes: the reducer's world size is the number of nodes,
    ranks_per_node exchanges run concurrently, and each rank keeps only its shard's residual. Last, the ranks of a node
    share the updates of their shards, sparse or dense, whichever is shorter. If a node's gradient is the mean over its
    ranks, and its residual consists of the shards::

        sum over nodes of acc  ==  sum over nodes of residual  +  num_nodes * update

    Slices depend only on the parameters, so residuals keep their places when DDP rebuilds buckets.

    Args:
        reducer: exchanges shards between nodes.
        ranks_per_node: ranks of a node; 1: each rank is a node.

    Raises:
        ValueError: ranks_per_node below 1; a reducer that needs whole matrices, or has two levels itself; before the
            first step, ranks_per_node does not divide the number of ranks.
    """

    ranks_per_node: int
    name: ClassVar[str] = "two_level"

    def __post_init__(self) -> None:
        WrappingReducer.__post_init__(self)
        if isinstance(innermost(self.reducer), PowerSGD):
            raise ValueError(
                f"two_level cuts matrices into shards, {self.reducer.full_name} needs them whole: "
                "give a SparseReducer, or use powersgd without two_level"
            )
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be a number of at least 1, got {self.ranks_per_node!r}")

    @property
    def shares_rounds(self) -> bool:
        """No: a rank whose shard is empty, or settled earlier, is ahead of the others of its node."""
        return False

    @property
    def method(self) -> str:
        """The name, the size of a node, and the reducer's method."""
        return f"{self.name} {self.ranks_per_node} {self.reducer.method}"

    def prepare(self, comm: Comm, device: torch.device) -> None:
        """Divide the ranks into nodes; see Reducer."""
        self.reducer.prepare(levels_of(comm, self.ranks_per_node, device).between, device)

    def parts(self, layout: Layout, place: int | None) -> tuple[Share | None, Share | None]:
        """Return the shard of this place in a node, which is not known before the first step."""
        return (None if place is None else layout.kept(node_shards, self.ranks_per_node)[place]), None

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the state as plain data and tensors: the reducer's of this rank's shard, and where it lies."""
        assert isinstance(state, ShareState)
        return ShareReducer.save(self, state) | {"place": state.place}

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        assert isinstance(state, ShareState)
        start, layout = Start.of(comm, grad.device), state.layout
        levels = levels_of(comm, self.ranks_per_node, grad.device)
        within, between = levels.within, levels.between
        within.traffic, between.traffic = Traffic(), comm.traffic
        self._place_(state, within.rank)
        shards, inner, outcome = layout.kept(node_shards, self.ranks_per_node), state.inner, None
        update = yield from over(within, node_mean(grad, shards, within))
        if inner is not None:
            inner.step = state.step
            outcome = yield from over(between, self.reducer.reduction(inner, update, between))
        indices = update.nonzero().view(-1)
        header = yield from over(within, share_header(outcome, indices.numel(), levels, grad.device))
        unsent = None
        if header.is_finite:
            written, unsent = _rounded(update, indices, grad.dtype)
            yield from over(within, gather_update_(grad, written, indices, header, shards))
        findings = () if header.is_finite else ((yield from find(grad, outcome, layout)),)
        comm.traffic.add_local(within.traffic)
        state.step += 1
        about: dict[str, Any] = {"step": state.step - 1, "numel": layout.numel, "rule": self.rule_name}
        made = Outcome(
            stats=stats_of(start, comm, grad.device, **about, **_found(header, outcome, layout.numel)),
            grad=grad,
            arrived=partial(torch.ne, grad, 0.0),  # no rank knows all shards' indices: a sent zero is not seen
            findings=findings,
        )
        if outcome is None or inner is None:
            return made
        return replace(made, on_deliver=partial(self._deliver, inner, outcome, unsent), on_drop=outcome.drop)

    def _place_(self, state: ShareState, place: int) -> None:
        """Give a new state its shard; of a saved one it is this place's."""
        if state.place is None:
            self._give_(state, place, self.reducer.start)
        assert state.place == place, f"state of place {state.place} used at place {place}"

    def _deliver(self, inner: BucketState, outcome: Outcome, unsent: SparseValues | None) -> None:
        """Keep what the shard's reducer did not send, and what rounding left out."""
        outcome.deliver()
        if unsent is not None:
            self.reducer.keep_(inner, unsent)

    def volume(self, bucket: Bucket) -> Volume:
        """Return what the ranks of a node send each other, and what the reducer sends of each shard; see Reducer.

        Raises:
            ValueError: the ranks do not fill nodes.
        """
        local, n = self.ranks_per_node, bucket.world_size
        if n % local:
            raise ValueError(f"ranks_per_node must divide the number of ranks, got {local} for {n} ranks")
        shards = [shard and self._between(bucket, shard) for shard in node_shards(bucket.named, local)]
        volume_of = cache(self.reducer.volume)  # most shards are equal
        volumes = [shard and volume_of(shard) for shard in shards]
        num_updated = sum(volume.num_updated for volume in volumes if volume)
        return Volume(
            world_size=n,
            ranks_per_node=local,
            local_calls=local_calls(bucket, local, num_updated),
            place_calls=tuple(volume.calls if volume else () for volume in volumes),
            num_updated=num_updated,
        )

    def _between(self, bucket: Bucket, shard: Share) -> Bucket:
        """Return what the ranks of one place reduce between nodes, in single precision at least."""
        numel, chosen = shard.layout.numel, bucket.local_count
        return replace(
            bucket,
            numel=numel,
            world_size=bucket.world_size // self.ranks_per_node,
            element_bytes=max(4, bucket.element_bytes),
            longest_count=None,
            layout=None if bucket.layout is None else shard.layout,
            local_count=None if chosen is None else chosen * numel * self.ranks_per_node / bucket.numel,
        )


def _found(header: NodeHeader, outcome: Outcome | None, numel: int) -> dict[str, Any]:
    """Return what the statistics of a vector of ``numel`` say of all shards, and of this rank's, if it has one."""
    found: dict[str, Any] = {
        "target_density": header.target_count / header.num_choices,
        "target_count": header.target_count,
        "counts": header.counts,
        "global_count": header.global_count,
        "dense_numel": header.dense_numel,
        "num_bins": header.num_choices if header.num_choices != numel else None,
    }
    if outcome is None:
        return found
    shard = outcome.stats
    rare = {"forgotten": shard.forgotten, "overfull": shard.overfull}
    return found | rare | {"threshold": shard.threshold, "select": shard.spans.select}


def _rounded(update: Tensor, indices: Tensor, dtype: torch.dtype) -> tuple[Tensor, SparseValues | None]:
    """Return the update of a shard in the dtype of the gradient, and what rounding takes from it, if anything.

    Args:
        indices: (k,) where it is not zero.
    """
    if update.dtype == dtype:
        return update, None
    lower = rounded(update, dtype)
    return lower, SparseValues(indices.to(torch.int32), rounding(update[indices], lower[indices]))
