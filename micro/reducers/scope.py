"""The vector in which a method selects: a bucket, each parameter, or the whole model."""

from dataclasses import replace
from typing import Literal, get_args

from micro.reducers.base import Reducer
from micro.reducers.sparse import SparseReducer
from micro.reducers.two_level import TwoLevel
from micro.reducers.wrapping import WrappingReducer
from micro.selectors.per_tensor import PerTensor

Scope = Literal["bucket", "tensor", "model"]
"""Where indices are selected: within each of DDP's buckets, each parameter, or the whole model."""


def scoped(reducer: Reducer, scope: Scope | str) -> Reducer:
    """Return ``reducer`` as it selects within ``scope``; see micro.attach.

    Raises:
        ValueError: no such scope, the reducer selects nothing, or its selector does not go with the scope.
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
        return reducer
    why = PerTensor.why_not(reducer.selector)
    if why:
        raise ValueError(f"scope=tensor: selector {reducer.selector.full_name} {why}: use scope=bucket")
    return replace(reducer, selector=PerTensor(selector=reducer.selector))
