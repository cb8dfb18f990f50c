"""Two levels: a dense mean within each node, any method between nodes."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm, Traffic
from micro.flat import Layout
from micro.nonfinite import Finding
from micro.reducers.base import BucketState, saved_layout
from micro.reducers.node_exchange import find, gather_update_, local_calls, node_mean, share_header
from micro.reducers.node_shards import NodeShards, node_buckets, node_shards
from micro.reducers.outcome import Outcome
from micro.reducers.powersgd import PowerSGD
from micro.reducers.rounding import rounded, rounding
from micro.reducers.wrapping import WrappingReducer, innermost
from micro.requests import Reduction, over
from micro.sparse import SparseValues
from micro.stats import Start, stats_of
from micro.traffic import Bucket, Volume


@dataclass(slots=True)
class TwoLevelState(BucketState):
    """The state of a bucket on one rank: memory is that of the shard which this rank exchanges with other nodes.

    Attributes:
        place: this rank's place in its node; None before the first step.
        shard: the reducer's state of the shard; None before the first step, and where the shard has no elements.
        shards: where the shards of the node's ranks lie; None before the first step.
        keys: under which something is kept of each parameter.
    """

    place: int | None = None
    shard: BucketState | None = None
    shards: NodeShards | None = None
    keys: tuple[str, ...] = ()

    def vector(self, key: str) -> Tensor:
        """Return a copy of what is kept under ``key`` (numel,) in the layout's order, zero outside of this shard.

        The sum over the ranks of a node is what the node keeps. Empty where the reducer keeps nothing, and before the
        first step.
        """
        kept = self.memory[key] if self.shard is None else self.shard.vector(key)
        if self.shards is None or self.place is None or key not in self.keys:
            return kept
        whole = kept.new_zeros(self.layout.numel)
        if kept.numel():
            whole[self.shards.positions(self.place, torch.arange(kept.numel(), device=kept.device))] = kept
        return whole

    def pieces(self, names: AbstractSet[str] | None = None) -> dict[str, dict[str, Tensor]]:
        """Return views of what is kept of each parameter: the slice of it that is in this rank's shard.

        The keys are the same on all ranks, also where a shard has no elements.
        """
        if self.place is None:
            return {}
        return {key: {} for key in self.keys} if self.shard is None else self.shard.pieces(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevel(WrappingReducer):
    """Average densely within a node, where links are fast, and with ``reducer`` between nodes.

    Ranks are numbered node by node, as torchrun does. Each rank of a node owns a slice of every parameter, its shard.
    A step has three parts. The gradients of a node are added up, each rank's shard at that rank. Each rank then
    exchanges its shard with the ranks of the same place in the other nodes: the reducer's world size is the number of
    nodes, ranks_per_node such exchanges run side by side, and each rank keeps the residual of its own shard only. Last
    the ranks of a node give each other the updates of their shards, sparse or whole, whichever is shorter. With the
    mean over its ranks as the gradient of a node, and what all of them keep as its residual::

        sum over nodes of acc  ==  sum over nodes of residual  +  num_nodes * update

    The slices depend on the parameters alone, so residuals stay where they are when DDP makes new buckets.

    Args:
        reducer: what exchanges shards between nodes.
        ranks_per_node: ranks of a node; 1: all ranks are nodes.

    Raises:
        ValueError: ranks_per_node below 1; a reducer that needs whole matrices, or is of two levels itself; before the
            first step, a number of ranks that ranks_per_node does not divide.
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
        self.reducer.prepare(comm.levels(self.ranks_per_node, device).between, device)

    def volume(self, bucket: Bucket) -> Volume:
        """Return what the ranks of a node send each other, and what the reducer sends of each shard; see Reducer.

        Raises:
            ValueError: the ranks do not fill nodes.
        """
        local, n = self.ranks_per_node, bucket.world_size
        if n % local:
            raise ValueError(f"ranks_per_node must divide the number of ranks, got {local} for {n} ranks")
        volume_of = cache(self.reducer.volume)  # most shards are equal
        shards = [shard and volume_of(shard) for shard in node_buckets(bucket, local)]
        num_updated = sum(shard.num_updated for shard in shards if shard)
        return Volume(
            world_size=n,
            ranks_per_node=local,
            local_calls=local_calls(bucket, local, num_updated),
            place_calls=tuple(shard.calls if shard else () for shard in shards),
            num_updated=num_updated,
        )

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> TwoLevelState:
        """Return a state that has no shard yet: which one it is depends on the rank."""
        wide = torch.promote_types(dtype, torch.float32)
        return TwoLevelState(layout, 0, {"residual": torch.zeros(0, dtype=wide, device=device)})

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        assert isinstance(state, TwoLevelState)
        start = Start.of(comm, grad.device)
        levels = comm.levels(self.ranks_per_node, grad.device)
        levels.within.traffic, levels.between.traffic = Traffic(), comm.traffic
        shards = self._begin(state, levels.within.rank, grad)
        update = yield from over(levels.within, node_mean(grad, shards, levels.within))
        inner: Outcome | None = None
        if state.shard is not None:
            between = levels.between
            inner = yield from over(between, self.reducer.reduction(state.shard, update, between))
        indices = update.nonzero().view(-1)
        header = yield from over(levels.within, share_header(inner, indices, levels))
        findings: tuple[Finding, ...] = ()
        unsent: SparseValues | None = None
        if header.is_finite:
            written, unsent = _rounded(update, indices, grad.dtype)
            yield from over(levels.within, gather_update_(grad, written, indices, header, shards))
        else:
            findings = ((yield from find(grad, inner, state.layout)),)
        comm.traffic.add_local(levels.within.traffic)
        state.step += 1
        stats = stats_of(
            start,
            comm,
            grad.device,
            step=state.step - 1,
            numel=state.layout.numel,
            rule=self.rule_name,
            target_density=header.target_count / state.layout.numel,
            target_count=header.target_count,
            counts=header.counts,
            global_count=header.global_count,
            threshold=inner.stats.threshold if inner else None,
            select=inner.stats.spans.select if inner else 0.0,
            forgotten=inner.stats.forgotten if inner else None,
            overfull=inner is not None and inner.stats.overfull,
        )
        if inner is None or state.shard is None:
            return Outcome(stats=stats, grad=grad, findings=findings)
        on_deliver = partial(self._deliver, inner, state.shard, unsent)
        return Outcome(stats=stats, grad=grad, findings=findings, on_deliver=on_deliver, on_drop=inner.drop)

    def _deliver(self, inner: Outcome, shard: BucketState, unsent: SparseValues | None) -> None:
        """Let the step of this rank's shard count; the reducer keeps what rounding took from it."""
        inner.deliver()
        if unsent is not None:
            self.reducer.keep_(shard, unsent)

    def _begin(self, state: TwoLevelState, place: int, grad: Tensor) -> NodeShards:
        """Give the state its shard, at its first step; return where the shards of the node's ranks lie."""
        shards = node_shards(state.layout, self.ranks_per_node)
        if state.place is None:
            layout = shards.layout(place)
            dtype = torch.promote_types(grad.dtype, torch.float32)
            self._take(state, place, None if layout is None else self.reducer.start(layout, dtype, grad.device))
        assert state.place == place, f"state of place {state.place} used at place {place}"
        if state.shard is not None:
            state.shard.step = state.step
        return shards

    def _take(self, state: TwoLevelState, place: int, shard: BucketState | None) -> None:
        """Make ``shard`` the state's; the memory of both is one."""
        state.place, state.shard = place, shard
        state.shards = node_shards(state.layout, self.ranks_per_node)
        one = self.reducer.start(_smallest(state.layout), torch.float32, torch.device("cpu"))
        state.keys = tuple(one.pieces())
        if shard is not None:
            state.memory.update(shard.memory)  # not replaced: a Split around this holds it too

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the state as plain data and tensors: the reducer's of this rank's shard, and where it lies."""
        assert isinstance(state, TwoLevelState)
        outer, inner = self._save_both(state, state.shard)
        return outer | {"place": state.place, "shard": inner}

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> TwoLevelState:
        """Return the state that ``save`` described.

        Raises:
            ValueError: it is the state of another method, or of nodes of another size.
        """
        self.check_method(saved)
        state = self.start(saved_layout(saved), dtype, device)
        state.step = saved["step"]
        if saved["place"] is not None:
            wide = torch.promote_types(dtype, torch.float32)
            inner = {**saved["shard"], "memory": saved["memory"]}
            self._take(state, saved["place"], self.reducer.load(inner, wide, device) if saved["shard"] else None)
        return state

    def rebuild(
        self, layout: Layout, old: Sequence[BucketState], dtype: torch.dtype, device: torch.device
    ) -> TwoLevelState:
        """Return the state of a new bucket; see Reducer. A rank owns the same slices of parameters as before."""
        state = self.start(layout, dtype, device)
        state.step = max((bucket.step for bucket in old), default=0)
        before = [bucket for bucket in old if isinstance(bucket, TwoLevelState)]
        place = next((bucket.place for bucket in before if bucket.place is not None), None)
        if place is not None:
            shard = node_shards(layout, self.ranks_per_node).layout(place)
            parts = [bucket.shard for bucket in before if bucket.shard is not None]
            wide = torch.promote_types(dtype, torch.float32)
            self._take(state, place, None if shard is None else self.reducer.rebuild(shard, parts, wide, device))
        return state

    def rescale_(self, state: BucketState, factor: float) -> None:
        """Multiply what is kept of this rank's shard; see Reducer."""
        assert isinstance(state, TwoLevelState)
        if state.shard is not None:
            self.reducer.rescale_(state.shard, factor)


def _smallest(layout: Layout) -> Layout:
    """Return the same parameters with one element each, or none: what a reducer keeps under is the same for both."""
    pairs = zip(layout.numels, layout.shapes, strict=True)
    return Layout(layout.names, tuple(tuple(1 for _ in shape) if numel else shape for numel, shape in pairs))


def _rounded(update: Tensor, indices: Tensor, dtype: torch.dtype) -> tuple[Tensor, SparseValues | None]:
    """Return the update of a shard in the dtype of the gradient, and what rounding takes from it, if anything.

    Args:
        indices: (k,) where it is not zero.
    """
    if update.dtype == dtype:
        return update, None
    lower = rounded(update, dtype)
    return lower, SparseValues(indices.to(torch.int32), rounding(update[indices], lower[indices]))
