"""Wrap selectors and exchanges so that every result is checked; for `micro.testing`, not for training."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.parts import Part
from micro.reducers.base import Reducer
from micro.reducers.sparse import SparseReducer
from micro.reducers.wrapping import WrappingReducer
from micro.values.sparse import Exchanged, Selection, Step

P = TypeVar("P", bound=Part)


def checked(reducer: Reducer) -> Reducer:
    """Return the reducer with a selector and an exchange that raise AssertionError for an invalid result."""
    if isinstance(reducer, WrappingReducer):
        return replace(reducer, reducer=checked(reducer.reducer))
    if not isinstance(reducer, SparseReducer):
        return reducer
    selector = _with_check(reducer.selector, "select", _check_selection)
    return replace(reducer, selector=selector, exchange=_with_check(reducer.exchange, "exchange", _check_exchanged))


def _with_check(part: P, method: str, check: Callable[..., None]) -> P:
    """Return the part with ``method`` checked: a valid result, and an accumulator that it did not modify."""
    own = type(part)

    def checking(self: P, state: Any, acc: Tensor, *given: Any) -> Reduction[Any]:
        before = acc.clone()
        result = yield from getattr(own, method)(self, state, acc, *given)
        where = f"{own.kind} {self.full_name}"
        assert torch.equal(acc, before), f"{where} changed the accumulator"
        check(where, result, acc.numel(), *given)
        return result

    subclass = type(own.__name__, (own,), {"__slots__": (), method: checking})
    settings = {field.name: getattr(part, field.name) for field in fields(part) if field.init}  # type: ignore[arg-type]
    made: P = subclass(**settings)
    return made


def _check_selection(where: str, selection: Selection, numel: int, _: Step, comm: Comm) -> None:
    _check_indices(where, selection.indices, numel)
    if selection.counts is not None:
        assert len(selection.counts) == comm.world_size, f"{where} returned counts of {len(selection.counts)} ranks"
        assert selection.counts[comm.rank] == selection.indices.numel(), f"{where} returned a wrong count"
    assert (selection.indices.diff() > 0).all(), f"{where} returned indices that do not ascend"


def _check_exchanged(where: str, exchanged: Exchanged, numel: int, *_: Any) -> None:
    for part in (*exchanged.update, exchanged.sent):
        _check_indices(where, part.indices, numel)
        assert part.indices.numel() == part.values.numel(), f"{where} returned values without an index"


def _check_indices(where: str, indices: Tensor, numel: int) -> None:
    assert indices.dtype == torch.int32, f"{where} returned indices of {indices.dtype}, not of int32"
    assert indices.unique().numel() == indices.numel(), f"{where} returned an index twice"
    if indices.numel():
        lowest, highest = int(indices.min()), int(indices.max())
        assert lowest >= 0, f"{where} returned index {lowest}"
        assert highest < numel, f"{where} returned index {highest} of {numel} elements"
