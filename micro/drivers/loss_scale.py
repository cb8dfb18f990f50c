"""Track the loss scale of mixed precision, which also scales gradients and residuals."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Protocol

import torch

from micro.feedback.momentum import MomentumCorrection
from micro.reducers.base import Reducer
from micro.reducers.quantized import Quantized
from micro.reducers.sparse import SparseReducer
from micro.reducers.wrapping import innermost
from micro.selectors.threshold import Threshold
from micro.selectors.wrapping import WrappingSelector


class HoldsScaler(Protocol):
    """An object that holds a GradScaler, such as timm's NativeScaler."""

    _scaler: torch.amp.GradScaler


Scaler = torch.amp.GradScaler | HoldsScaler | Callable[[], float]
"""A GradScaler, an object that holds one, or a function that returns the current scale."""


def scale_of(scaler: Scaler | None) -> Callable[[], float] | None:
    """Return a function that returns the current scale; None if the loss is not scaled.

    Raises:
        ValueError: ``scaler`` is of another type.
    """
    known: Any = getattr(scaler, "_scaler", scaler)
    if isinstance(known, torch.amp.GradScaler):
        return known.get_scale if known.is_enabled() else None
    if scaler is None:
        return None
    if not callable(scaler):
        raise ValueError(
            f"scaler must be a torch.amp.GradScaler, an object that holds one as _scaler, or a function that returns "
            f"the scale of the loss, got {type(scaler).__name__}: give that of your loop"
        )
    return scaler


class LossScale:
    """The scale of the loss, and that of the residuals.

    Args:
        scale: returns the current scale, equal on all ranks; None if the loss is not scaled.

    Attributes:
        value: the scale of the residuals; 1 before the first backward.
        is_used: whether the loss is scaled. Then the loop's scaler, not the reducer's policy, handles NaN and Inf.
    """

    def __init__(self, scale: Callable[[], float] | None) -> None:
        self._scale = scale
        self.is_used = scale is not None
        self.value = 1.0

    @property
    def current(self) -> float:
        """The current scale of this rank's scaler; 1 without one.

        Raises:
            ValueError: the scaler does not return a number.
        """
        return 1.0 if self._scale is None else _number(self._scale)

    def follow(self, scales: Mapping[int, float]) -> float:
        """Adopt the scale of a backward; return the factor by which residuals must be multiplied.

        Args:
            scales: of each rank that has inputs in this backward.

        Raises:
            ValueError: the scales differ, or are not positive.
        """
        (first, scale), *others = scales.items()
        _check_positive(scale, f" on rank {first}")
        for rank, other in others:
            if other != scale:
                raise ValueError(
                    f"scale of the loss must be the same on all ranks, got {scale:g} on rank {first} and {other:g} on "
                    f"rank {rank}: give all scalers the same settings, and the state of one rank's"
                )
        factor, self.value = scale / self.value, scale
        return factor


def _number(scale: Callable[[], float]) -> float:
    """Return the current scale. Raises ValueError if it is not a number."""
    try:
        return float(scale())  # host sync: once a step, on the lane
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"scaler must return the scale of the loss, a number, when it is called without arguments: {error}"
        ) from error


def _check_positive(scale: float, rank: str) -> None:
    if not 0 < scale < inf:
        raise ValueError(
            f"scale of the loss must be a positive number, got {scale:g}{rank}: a scaler that fell to 0 found no step "
            "finite, so look for NaN in weights and inputs"
        )


def check_scaler(scaler: Scaler | None, reducer: Reducer) -> None:
    """Raise ValueError unless ``scaler`` is None, or valid and supported by the reducer."""
    scale = scale_of(scaler)
    if scaler is None:
        return
    if scale is not None:
        _check_positive(_number(scale), "")
    inner = innermost(reducer)
    if not isinstance(inner, SparseReducer | Quantized):
        return
    if isinstance(inner.feedback, MomentumCorrection) and inner.feedback.clip is not None:
        raise ValueError(
            "clip of feedback momentum is in units of gradients, which a scaler changes: use clip of micro.attach"
        )
    selector = inner.selector if isinstance(inner, SparseReducer) else None
    while isinstance(selector, WrappingSelector):
        selector = selector.selector
    if isinstance(selector, Threshold):
        raise ValueError(
            "selector threshold has its threshold in units of gradients, which a scaler changes: use topk, for instance"
        )
