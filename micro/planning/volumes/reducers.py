"""The collectives of every reducer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from micro.density.base import target_count
from micro.feedback import NoFeedback
from micro.flat import Layout
from micro.planning.volumes.bucket import Bucket
from micro.planning.volumes.calls import Calls, Volume
from micro.planning.volumes.exchanges import calls_of_exchange
from micro.planning.volumes.selection import calls_of_selector
from micro.planning.volumes.sparse_step import step_of
from micro.planning.volumes.two_levels import joined
from micro.reducers.base import Reducer
from micro.reducers.dct import DCTReducer
from micro.reducers.dense import DenseReducer
from micro.reducers.fft import FFTReducer
from micro.reducers.powersgd import PowerSGD
from micro.reducers.sparse import SparseReducer
from micro.reducers.split import Split
from micro.reducers.two_level import TwoLevel
from micro.selectors.topk import TopK
from micro.transforms import num_bins


def volume_of(
    reducer: Reducer,
    numel: int,
    world_size: int,
    *,
    build_up: float | None = None,
    local_count: float | None = None,
    longest_count: float | None = None,
    layout: Layout | None = None,
    element_bytes: int = 4,
) -> Volume:
    """Return the collectives that ``reducer`` calls for a bucket of ``numel`` elements, each with its size, in turn.

    The step is one in steady state: controllers have settled, and nothing that happens once in a while is due (MiCRO's
    search for a lost threshold, Ok-Topk's repartition and spreading, re-evaluations). Sizes are counted as
    micro.planning.tables.LinkTable counts them, as the mean over ranks; in the rounds of gTop-k's tree, where most
    ranks send nothing, they are of a rank that sends. Counts and regions are assumed equal on all ranks. Of a density
    that changes with time the final one counts, the lower one where it alternates.

    Args:
        build_up: distinct indices in the update over the target count, both of what is not reduced densely. None: where
            ranks choose by themselves, as if they chose at random, numel (1 - (1 - local_count / numel)^n); 1
            otherwise, and where an exchange keeps k.
        local_count: elements that one rank chooses. None: k, or its share of build_up * k where ranks divide the
            vector among them. With two levels, of its shard, as a mean over the shards.
        longest_count: elements that the rank chooses which chooses most, of one level: to it lists may be padded. None:
            as many as one rank, and where ranks divide the vector what chance adds.
        layout: names and shapes of the bucket's parameters, where the method looks at them; one vector by default.
        element_bytes: of one number of the gradient. What travels is accumulated in four bytes at least.

    Raises:
        ValueError: no elements or ranks, a layout of another length or none where shapes decide, ranks that do not fill
            nodes, or a part that this package does not know.
    """
    bucket = Bucket(
        numel=numel,
        world_size=world_size,
        build_up=build_up,
        local_count=local_count,
        longest_count=longest_count,
        layout=layout,
        element_bytes=element_bytes,
    )
    return _volume(reducer, bucket)


def calls_of(reducer: Reducer, numel: int, world_size: int, **facts: Any) -> Calls:
    """Return the collectives of ``volume_of`` for a reducer of one level.

    Raises:
        ValueError: as there, or the reducer is of two levels.
    """
    volume = volume_of(reducer, numel, world_size, **facts)
    if volume.place_calls:
        raise ValueError(f"{reducer.full_name} calls collectives of two levels: ask for its volume_of")
    return volume.calls


def _volume(reducer: Reducer, bucket: Bucket) -> Volume:
    for kind, volume in _KINDS.items():
        if isinstance(reducer, kind):
            return volume(reducer, bucket)
    raise ValueError(f"what reducer {reducer.name} sends is not known: state it in micro.planning.volumes")


def _one_level(bucket: Bucket, calls: Calls, num_updated: float) -> Volume:
    if bucket.world_size == 1:
        calls = ()
    return Volume(world_size=bucket.world_size, calls=calls, num_updated=num_updated)


def _of_dense(_: DenseReducer, bucket: Bucket) -> Volume:
    return _one_level(bucket, (("all_reduce", bucket.numel * bucket.element_bytes),), bucket.numel)


def _of_fft(reducer: FFTReducer, bucket: Bucket) -> Volume:
    bins = num_bins(bucket.numel)
    count = target_count(reducer.density_policy.density, bins)
    values = reducer.codec.num_bytes(2 * count, bucket.dtype) + 1  # and the finite flag
    calls: Calls = ("gather_lists", reducer.indices.num_bytes(count, bins)), ("gather_lists", values)
    return _one_level(bucket, calls, bucket.numel)


def _of_dct(reducer: DCTReducer, bucket: Bucket) -> Volume:
    tiles = SparseReducer(
        TopK(scope="chunk"),
        reducer.density,
        reducer.exchange,
        codec=reducer.codec,
        indices=reducer.indices,
        feedback=NoFeedback(),
    )
    return _of_sparse(tiles, bucket)


def _of_powersgd(reducer: PowerSGD, bucket: Bucket) -> Volume:
    if bucket.world_size == 1:
        return _one_level(bucket, (), bucket.numel)
    if bucket.layout is None:
        raise ValueError("what powersgd sends depends on the parameters' shapes: give a layout")
    sizes = [numbers * bucket.dtype.itemsize for numbers in reducer.num_sent(bucket.layout)]
    left, right = sizes
    calls: Calls = (("all_reduce", left),)
    return _one_level(bucket, (*calls, ("all_reduce", right)) if right else calls, bucket.numel)


def _of_split(reducer: Split, bucket: Bucket) -> Volume:
    if bucket.layout is None:
        raise ValueError("what split sends depends on the parameters' names and shapes: give a layout")
    dense, sparse = reducer.shares(bucket.layout)
    num_dense = 0 if dense is None else dense.layout.numel
    calls: Calls = (("all_reduce", num_dense * bucket.element_bytes),) if num_dense else ()
    whole = _one_level(bucket, calls, num_dense)
    if sparse is None:
        return whole
    rest = _volume(reducer.reducer, replace(bucket, numel=sparse.layout.numel, layout=sparse.layout))
    return replace(rest, calls=(*whole.calls, *rest.calls), num_updated=num_dense + rest.num_updated)


def _of_sparse(reducer: SparseReducer, bucket: Bucket) -> Volume:
    layout = bucket.named
    reducer = reducer.at(reducer.density_policy.density)
    step = step_of(
        reducer,
        layout,
        bucket.world_size,
        bucket.dtype,
        build_up=bucket.build_up,
        local_count=bucket.local_count,
        longest_count=bucket.longest_count,
    )
    if bucket.world_size == 1:
        return _one_level(bucket, (), step.total)
    selection = calls_of_selector(step.selector, reducer.density_policy.density, layout, bucket.world_size)
    return _one_level(bucket, (*selection, *calls_of_exchange(step)), step.total)


def _of_two_level(reducer: TwoLevel, bucket: Bucket) -> Volume:
    return joined(bucket, reducer.ranks_per_node, lambda shard: _volume(reducer.reducer, shard))


_KINDS: Mapping[type[Reducer], Callable[[Any, Bucket], Volume]] = {
    DenseReducer: _of_dense,
    DCTReducer: _of_dct,
    FFTReducer: _of_fft,
    PowerSGD: _of_powersgd,
    Split: _of_split,
    SparseReducer: _of_sparse,
    TwoLevel: _of_two_level,
}
