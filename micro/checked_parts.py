"""Parts that check at every step what they return: for `micro.testing`, not for training."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.parts import Part
from micro.reducers.base import Reducer
from micro.reducers.sparse import SparseReducer
from micro.reducers.wrapping import WrappingReducer
from micro.requests import Reduction
from micro.selectors.base import Selector
from micro.sparse import Exchanged, Selection, Step

P = TypeVar("P", bound=Part)


def checked(reducer: Reducer) -> Reducer:
    """Return the reducer with a selector and an exchange that raise AssertionError where they return what is wrong."""
    if isinstance(reducer, WrappingReducer):
        return replace(reducer, reducer=checked(reducer.reducer))
    if not isinstance(reducer, SparseReducer):
        return reducer
    selector, exchange = _with(reducer.selector, select=_select), _with(reducer.exchange, exchange=_exchange)
    return replace(reducer, selector=selector, exchange=exchange)


def _with(part: P, **methods: Any) -> P:
    """Return the part with other methods, each of which is given the part's own as its first argument."""
    own = type(part)
    bound = {name: _calling(method, getattr(own, name)) for name, method in methods.items()}
    subclass = type(own.__name__, (own,), {"__slots__": (), **bound})
    settings = {field.name: getattr(part, field.name) for field in fields(part) if field.init}  # type: ignore[arg-type]
    checking: P = subclass(**settings)
    return checking


def _calling(method: Any, own: Any) -> Any:
    return lambda self, *args, **named: method(own, self, *args, **named)


def _select(own: Any, selector: Selector[Any], state: Any, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
    before = acc.clone()
    selection: Selection = yield from own(selector, state, acc, step, comm)
    where = f"selector {selector.full_name}"
    assert torch.equal(acc, before), f"{where} changed the accumulator"
    _check_indices(selection.indices, acc.numel(), where)
    if selection.counts is not None:
        assert len(selection.counts) == comm.world_size, f"{where} returned counts of {len(selection.counts)} ranks"
        assert selection.counts[comm.rank] == selection.indices.numel(), f"{where} returned a wrong count"
    if selection.all_indices is None:
        assert (selection.indices.diff() > 0).all(), f"{where} returned indices that do not ascend"
    return selection


def _exchange(own: Any, exchange: Any, state: Any, acc: Tensor, *given: Any, **named: Any) -> Reduction[Exchanged]:
    before = acc.clone()
    exchanged: Exchanged = yield from own(exchange, state, acc, *given, **named)
    where = f"exchange {exchange.full_name}"
    assert torch.equal(acc, before), f"{where} changed the accumulator"
    for part in (*exchanged.update, exchanged.sent):
        _check_indices(part.indices, acc.numel(), where)
        assert part.indices.numel() == part.values.numel(), f"{where} returned values without an index"
    return exchanged


def _check_indices(indices: Tensor, numel: int, where: str) -> None:
    assert indices.dtype == torch.int32, f"{where} returned indices of {indices.dtype}, not of int32"
    assert indices.unique().numel() == indices.numel(), f"{where} returned an index twice"
    if indices.numel():
        lowest, highest = int(indices.min()), int(indices.max())
        assert lowest >= 0, f"{where} returned index {lowest}"
        assert highest < numel, f"{where} returned index {highest} of {numel} elements"
