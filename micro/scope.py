"""The vector in which a method selects, whatever travels together: a bucket, each parameter, or the whole model."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, get_args

from micro.exchanges.in_pieces import InPieces
from micro.flat import Layout
from micro.reducers.base import Reducer
from micro.reducers.sparse import SparseReducer
from micro.reducers.split import Split
from micro.reducers.two_level import TwoLevel
from micro.reducers.wrapping import WrappingReducer
from micro.selectors.per_tensor import PerTensor

Scope = Literal["bucket", "tensor", "model"]
"""Where indices are selected: within each of DDP's buckets, each parameter, or the whole model."""


def scoped(reducer: Reducer, scope: Scope | str) -> Reducer:
    """Return ``reducer`` as it selects within ``scope``; see micro.attach.

    Raises:
        ValueError: no such scope, or the reducer selects nothing, or cannot send its selection in pieces.
    """
    if scope not in get_args(Scope):
        raise ValueError(f"scope must be one of {', '.join(get_args(Scope))}, got '{scope}'")
    if scope == "bucket":
        return reducer
    if isinstance(reducer, TwoLevel) and scope == "model":
        raise ValueError("scope=model joins buckets, two_level cuts each into shards: use scope=bucket or tensor")
    if isinstance(reducer, WrappingReducer):
        return replace(reducer, reducer=scoped(reducer.reducer, scope))
    if not isinstance(reducer, SparseReducer):
        raise ValueError(f"scope={scope} means nothing for {reducer.name}, which chooses no elements: use scope=bucket")
    if scope == "model":
        _ = InPieces(each=reducer.exchange, ends=(1,))  # refuses what cannot be sent bucket by bucket
        return reducer
    return replace(reducer, selector=PerTensor(selector=reducer.selector))


def joined(reducer: Reducer, layouts: Sequence[Layout]) -> tuple[Reducer, Layout]:
    """Return a reducer that selects over all buckets at once and sends bucket by bucket, and the layout of them all."""
    if len(layouts) == 1:
        return reducer, layouts[0]
    names = tuple(name for layout in layouts for name in layout.names)
    shapes = tuple(shape for layout in layouts for shape in layout.shapes)
    return _in_pieces(reducer, layouts), Layout(names, shapes)


def _in_pieces(reducer: Reducer, layouts: Sequence[Layout]) -> Reducer:
    """Return a reducer that sends what it selects of each layout by itself."""
    if isinstance(reducer, Split):
        sparse = [share.layout for share, _ in map(reducer.parts, layouts) if share is not None]
        return replace(reducer, reducer=_in_pieces(reducer.reducer, sparse)) if len(sparse) > 1 else reducer
    assert isinstance(reducer, SparseReducer)
    ends = tuple(accumulate(layout.numel for layout in layouts))
    return replace(reducer, exchange=InPieces(each=reducer.exchange, ends=ends))
