"""The collectives that a method calls for one bucket and their sizes, from which its cost on any network follows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from micro.density.base import Target, target_count
from micro.exchanges.base import Exchange
from micro.exchanges.in_pieces import InPieces
from micro.exchanges.oktopk import NUM_SUM_BINS
from micro.flat import Layout
from micro.operations import Op
from micro.partition import layer_pieces
from micro.reducers.base import Reducer
from micro.reducers.dense import DenseReducer
from micro.reducers.fft import FFTReducer
from micro.reducers.powersgd import PowerSGD
from micro.reducers.sparse import SparseReducer
from micro.reducers.split import Split
from micro.selectors.base import Selector
from micro.selectors.micro_rules.agreed import NUM_CANDIDATE_BINS
from micro.selectors.per_tensor import PerTensor
from micro.selectors.topk import TopK
from micro.sparse import Overlap
from micro.transforms import num_bins

Call = tuple[Op, float]
Calls = tuple[Call, ...]

COUNT_BYTES = 4  # a length or a flag travels as int32
NEAR_SHARE = 0.25  # Ok-Topk: sums in the bin of the k-th, to those chosen: 0.1 to 0.5 on independent normal gradients


def calls_of(
    reducer: Reducer,
    numel: int,
    world_size: int,
    *,
    build_up: float | None = None,
    local_count: float | None = None,
    layout: Layout | None = None,
    element_bytes: int = 4,
) -> Calls:
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
            vector among them.
        layout: names and shapes of the bucket's parameters, where the method looks at them; one vector by default.
        element_bytes: of one number of the gradient. What travels is accumulated in four bytes at least.

    Raises:
        ValueError: no elements or ranks, a layout of another length or none where shapes decide, or a part that this
            module does not know.
    """
    if numel < 1 or world_size < 1:
        raise ValueError(f"numel and world_size must be at least 1, got {numel} and {world_size}")
    if layout is not None and layout.numel != numel:
        raise ValueError(f"layout has {layout.numel} elements, the bucket {numel}")
    if element_bytes not in _DTYPES:
        raise ValueError(f"element_bytes must be one of {', '.join(map(str, _DTYPES))}, got {element_bytes}")
    if world_size == 1:
        return ()
    if isinstance(reducer, DenseReducer):
        return (("all_reduce", numel * element_bytes),)
    dtype = _DTYPES[element_bytes]
    if isinstance(reducer, FFTReducer):
        return _of_fft(reducer, numel, dtype)
    if isinstance(reducer, PowerSGD):
        return _of_powersgd(reducer, layout, dtype)
    if isinstance(reducer, Split):
        return _of_split(reducer, layout, world_size, element_bytes, build_up=build_up, local_count=local_count)
    if not isinstance(reducer, SparseReducer):
        raise ValueError(f"what reducer {reducer.name} sends is not known: state it in micro.planning.volumes")
    layout = layout or Layout.flat(numel)
    reducer = reducer.at(reducer.density_policy.density)
    step = _step_of(reducer, layout, world_size, dtype, build_up=build_up, local_count=local_count)
    density = reducer.density_policy.density
    return (*_of_selector(step.selector, density, layout, world_size), *_of_exchange(step))


_DTYPES = {2: torch.float32, 4: torch.float32, 8: torch.float64}  # of the accumulator


def _of_fft(reducer: FFTReducer, numel: int, dtype: torch.dtype) -> Calls:
    bins = num_bins(numel)
    count = target_count(reducer.density_policy.density, bins)
    values = reducer.codec.num_bytes(2 * count, dtype) + 1  # and the finite flag
    return ("gather_lists", reducer.indices.num_bytes(count, bins)), ("gather_lists", values)


def _of_split(
    reducer: Split,
    layout: Layout | None,
    world_size: int,
    element_bytes: int,
    *,
    build_up: float | None,
    local_count: float | None,
) -> Calls:
    if layout is None:
        raise ValueError("what split sends depends on the parameters' names and shapes: give a layout")
    dense, sparse = reducer.shares(layout)
    calls: Calls = () if dense is None else (("all_reduce", dense.layout.numel * element_bytes),)
    if sparse is None:
        return calls
    rest = calls_of(
        reducer.reducer,
        sparse.layout.numel,
        world_size,
        build_up=build_up,
        local_count=local_count,
        layout=sparse.layout,
        element_bytes=element_bytes,
    )
    return (*calls, *rest)


def _of_powersgd(reducer: PowerSGD, layout: Layout | None, dtype: torch.dtype) -> Calls:
    if layout is None:
        raise ValueError("what powersgd sends depends on the parameters' shapes: give a layout")
    left, right = reducer.num_sent(layout)
    calls: Calls = (("all_reduce", left * dtype.itemsize),)
    return (*calls, ("all_reduce", right * dtype.itemsize)) if right else calls


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What a sparse method has to send: of a bucket, or of a piece of it that is exchanged by itself.

    Attributes:
        numel, world_size, dtype: of the bucket or piece and of its accumulator.
        k: target number of indices.
        chosen: by one rank.
        total: distinct indices in the update.
        knows_counts: whether all ranks know how many each chose.
        has_slices: whether each rank searches one slice of its own, so that its indices count from where that begins.
    """

    reducer: SparseReducer
    exchange: Exchange[Any]
    numel: int
    world_size: int
    dtype: torch.dtype
    k: int
    chosen: float
    total: float
    knows_counts: bool
    has_slices: bool

    @property
    def selector(self) -> Selector[Any]:
        return self.reducer.selector

    @property
    def is_published(self) -> bool:
        return self.exchange.rule_name == "published"

    def indices(self, count: float, span: float) -> float:
        """Return the bytes of ``count`` indices in a range of ``span`` elements."""
        return self.reducer.indices.num_bytes(round(count), max(round(span), 1))

    def values(self, count: float) -> float:
        """Return the bytes of ``count`` encoded values."""
        return self.reducer.codec.num_bytes(round(count), self.dtype)


def _step_of(
    reducer: SparseReducer,
    layout: Layout,
    world_size: int,
    dtype: torch.dtype,
    *,
    build_up: float | None,
    local_count: float | None,
) -> _Step:
    selector, numel, density = reducer.selector, layout.numel, reducer.density_policy.density
    k = selector.effective_target(Target(density, target_count(density, numel)), layout).count
    total = None if build_up is None else min(build_up * k, numel)
    if selector.overlap is Overlap.ANY:
        chosen = local_count or _by_itself(selector, density, layout, k)
        if total is None:
            total = _union(numel, chosen, world_size)
            total = min(total, k) if reducer.exchange.name in _KEEPING_K else total
    else:
        total = min(k, numel) if total is None else total
        chosen = local_count or (total / world_size if selector.overlap is Overlap.DISJOINT else total)
    return _Step(
        reducer=reducer,
        exchange=reducer.exchange,
        numel=numel,
        world_size=world_size,
        dtype=dtype,
        k=k,
        chosen=min(chosen, numel),
        total=total,
        knows_counts=_knows_counts(selector),
        has_slices=selector.name in _WITH_SLICES,
    )


def _by_itself(selector: Selector[Any], density: float, layout: Layout, k: int) -> float:
    """Return how many elements a rank chooses whose target is k."""
    if isinstance(selector, TopK) and selector.scope == "layer":  # rounds within each parameter, k is the bucket's
        return sum(target_count(density, numel) for numel in layout.numels if numel)
    return k


def _union(numel: int, chosen: float, world_size: int) -> float:
    """Return how many distinct indices ranks choose that choose independently of each other."""
    return numel * (1 - (1 - min(chosen / numel, 1.0)) ** world_size)


def _of_selector(selector: Selector[Any], density: float, layout: Layout, n: int) -> Calls:
    """Return the collectives of the selection; most selectors call none."""
    if isinstance(selector, PerTensor):  # each parameter is a vector of its own
        parameters = [Layout((name,), (shape,)) for name, shape in zip(layout.names, layout.shapes, strict=True)]
        return tuple(call for alone in parameters for call in _of_selector(selector.selector, density, alone, n))
    takes_all = selector.name in _WITH_SLICES and selector.rule_name != "published"
    if takes_all and target_count(density, layout.numel) == layout.numel:  # all ranks know what all choose
        return ()
    if selector.name == "micro":
        return _RULES[str(selector.rule_name)]
    if selector.name == "exdyna":
        return _RULES["agreed" if selector.rule_name == "repaired" else "published"]
    if selector.name == "deft":
        num_pieces = len(layer_pieces(layout.numels, n))
        if selector.rule_name == "repaired":
            return (("all_reduce", 8 * num_pieces),)  # norms, as float64
        return (("broadcast", COUNT_BYTES * (num_pieces + n)),)
    return ()


_RULES: Mapping[str, Calls] = {
    "agreed": (("gather_rows", COUNT_BYTES * NUM_CANDIDATE_BINS),),
    "repaired": (("gather_rows", 16),),  # a count and a sum of logarithms, as float64
    "published": (("gather_rows", COUNT_BYTES),),
}
_WITH_SLICES = ("micro", "exdyna")
_KNOWING_COUNTS = (
    "topk",
    "leader",
    "randomk",
    "everything",
    "micro",
    "exdyna",
)  # all ranks know every rank's count after the selection


def _knows_counts(selector: Selector[Any]) -> bool:
    if isinstance(selector, PerTensor):
        return _knows_counts(selector.selector)
    return selector.name in _KNOWING_COUNTS or (selector.name == "deft" and selector.rule_name == "repaired")


def _of_exchange(step: _Step) -> Calls:
    if isinstance(step.exchange, InPieces):
        return _of_pieces(step, step.exchange)
    if step.exchange.name not in _EXCHANGES:
        raise ValueError(f"what exchange {step.exchange.name} sends is not known: state it in micro.planning.volumes")
    return _EXCHANGES[step.exchange.name](step)


def _of_pieces(step: _Step, exchange: InPieces) -> Calls:
    """Return the calls of all pieces in turn; what was chosen is taken to lie evenly over them."""
    pieces = exchange.pieces(torch.empty(step.numel, dtype=step.dtype, device="meta"))
    if len(pieces) == 1:
        return _of_exchange(replace(step, exchange=exchange.each))
    calls: list[Call] = []
    for start, stop in pieces:
        share = (stop - start) / step.numel
        piece = replace(
            step,
            exchange=exchange.each,
            numel=stop - start,
            k=round(share * step.k),
            chosen=share * step.chosen,
            total=share * step.total,
            knows_counts=step.selector.overlap is Overlap.SAME,
            has_slices=False,
        )
        calls += _of_exchange(piece)
    return tuple(calls)


def _of_union(step: _Step) -> Calls:
    counts: Calls = () if step.knows_counts else (("gather_rows", COUNT_BYTES),)
    return *counts, *_of_indices(step), *_of_mean(step)


def _of_indices(step: _Step) -> Calls:
    """Return how the ranks' indices are made known: not at all where all hold the same."""
    overlap = step.selector.overlap
    if overlap is Overlap.SAME:
        return ()
    if overlap is Overlap.LEADER:
        return (("broadcast", step.indices(step.total, step.numel)),)
    span = step.numel / step.world_size if step.has_slices else step.numel
    return (("gather_lists", step.indices(step.chosen, span)),)


def _of_mean(step: _Step) -> Calls:
    """Return how one value of each rank at every shared index becomes their mean; a finite flag travels along."""
    n = step.world_size
    if step.reducer.codec.lossless:
        return (("all_reduce", (round(step.total) + 1) * step.dtype.itemsize),)
    part = step.values(step.total / n)
    return ("scatter", (n - 1) * (part + 1)), ("gather_lists", part)


def _of_gather(step: _Step) -> Calls:
    header: Call = ("gather_rows", 2 * COUNT_BYTES)
    return header, *_of_indices(step), ("gather_lists", step.values(step.chosen))


def _of_gtopk(step: _Step) -> Calls:
    header: Call = ("gather_rows", 2 * COUNT_BYTES)
    length = min(step.k, step.numel)
    pair = (8.0 * length,) * 2 if step.is_published else (step.indices(length, step.numel), step.values(length))
    up: Calls = tuple(("scatter", size) for size in pair) * (step.world_size - 1).bit_length()
    return header, *up, *(("broadcast", size) for size in pair)


def _of_dsa(step: _Step) -> Calls:
    n = step.world_size
    entries = step.chosen - 1 if step.is_published else step.chosen  # its rule keeps back the smallest
    indices, values = step.indices(step.total / n, step.numel / n), step.values(step.total / n)
    region = step.values(step.numel / n)
    dense = 3 * step.total >= step.numel if step.is_published else region < indices + values
    sums: Calls = (("gather_lists", region),) if dense else (("gather_lists", indices), ("gather_lists", values))
    return *_to_regions(step, entries), ("gather_rows", 3 * COUNT_BYTES), *sums


def _of_oktopk(step: _Step) -> Calls:
    held = step.total / step.world_size
    counts: Calls = (("gather_rows", 3 * COUNT_BYTES),)
    if not step.is_published:  # a histogram, then the sums near the k-th
        near = NEAR_SHARE * held * step.dtype.itemsize
        counts = ("gather_rows", COUNT_BYTES * (NUM_SUM_BINS + 2)), ("gather_lists", near)
    indices, values = step.indices(held, step.numel / step.world_size), step.values(held)
    return *_to_regions(step, step.chosen), *counts, ("gather_lists", indices), ("gather_lists", values)


def _to_regions(step: _Step, entries: float) -> Calls:
    """Return how every entry reaches the rank that owns its region."""
    n = step.world_size
    return (
        ("scatter", COUNT_BYTES * (n - 1)),
        ("scatter", (n - 1) * step.indices(entries / n, step.numel / n)),
        ("scatter", (n - 1) * step.values(entries / n)),
    )


_KEEPING_K = ("gtopk", "oktopk")  # the update has k indices whatever the ranks chose
_EXCHANGES: Mapping[str, Callable[[_Step], Calls]] = {
    "union": _of_union,
    "gather": _of_gather,
    "gtopk": _of_gtopk,
    "dsa": _of_dsa,
    "oktopk": _of_oktopk,
}
