"""The factor that a GradScaler puts on the loss, and so on the gradients and on all that is kept of them."""

from collections.abc import Mapping

import torch

from micro.feedback import MomentumCorrection
from micro.reducers.base import Reducer
from micro.reducers.sparse import SparseReducer
from micro.reducers.wrapping import innermost
from micro.selectors.threshold import Threshold
from micro.selectors.wrapping import WrappingSelector


class LossScale:
    """The scale of a GradScaler, and the one that the residuals have.

    Args:
        scaler: torch.amp.GradScaler, or None where the loss is not scaled.

    Attributes:
        value: the factor on what is kept; 1 before the first backward.
        is_used: whether the loss is scaled: then the scaler, and not the reducer's policy, acts on what is not finite.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.is_used = self._scaler is not None
        self.value = 1.0

    @property
    def current(self) -> float:
        """The scale that this rank's scaler has now; 1 where there is none."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())  # host sync: once a step, on the lane

    def follow(self, scales: Mapping[int, float]) -> float:
        """Take over the scale of a backward; return the factor on what is kept, 1 where the scale is as before.

        Args:
            scales: by rank, of those that have inputs in this backward.

        Raises:
            ValueError: they are not all the same.
        """
        (first, scale), *others = scales.items()
        for rank, other in others:
            if other != scale:
                raise ValueError(
                    f"scale of the GradScaler must be the same on all ranks, got {scale:g} on rank {first} and "
                    f"{other:g} on rank {rank}: give all ranks the same settings, and the state of one, by "
                    "scaler.load_state_dict"
                )
        factor, self.value = scale / self.value, scale
        return factor


def check_scaler(scaler: object, reducer: Reducer) -> None:
    """Raise ValueError unless ``scaler`` is a GradScaler that goes with the reducer, or None."""
    if scaler is None:
        return
    if not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}: give that of your loop")
    inner = innermost(reducer)
    if not isinstance(inner, SparseReducer):
        return
    if isinstance(inner.feedback, MomentumCorrection) and inner.feedback.clip is not None:
        raise ValueError(
            "clip of feedback momentum is in units of gradients, which a scaler changes: use clip of micro.attach"
        )
    selector = inner.selector
    while isinstance(selector, WrappingSelector):
        selector = selector.selector
    if isinstance(selector, Threshold):
        raise ValueError(
            "selector threshold has its threshold in units of gradients, which a scaler changes: use topk, for instance"
        )
