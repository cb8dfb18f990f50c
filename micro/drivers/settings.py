"""The settings that micro.attach and micro.attach_fsdp share, and their checks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any

import torch
from torch import Tensor

from micro.drivers.loss_scale import Scaler, check_scaler, scale_of
from micro.drivers.summary import StepSummary
from micro.reducers.base import Reducer, check_reducer
from micro.reducers.scope import Scope, scoped
from micro.reducers.split import Split
from micro.reducers.wrapping import layers
from micro.values import flat
from micro.values.clipping import check_clip
from micro.values.flat import real
from micro.values.names import as_patterns

Choice = str | Iterable[str] | Callable[[str, Tensor], bool]
"""Parameters: patterns of their names, or a function that returns whether to choose one, from name and parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of an attachment; micro.attach explains each."""

    scope: Scope | str
    only: Choice | None
    dense: Choice | None
    start_step: int
    clip: float | None
    clip_norm: str
    timed: bool
    on_step: Callable[[StepSummary], object] | None
    scaler: Scaler | None

    @property
    def whole_model(self) -> bool:
        """Whether indices are selected over all vectors at once."""
        return self.scope == "model"

    def fitted(self, reducer: object, trained: Mapping[str, Tensor], norms: Sequence[str]) -> Reducer:
        """Return the reducer for the ``trained`` parameters of a model, by name.

        Args:
            norms: which norms ``clip`` may bound.

        Raises:
            ValueError: a setting is out of its range, or does not fit the reducer or the model.
        """
        check_clip(self.clip, self.clip_norm, norms)
        if self.on_step is not None and not callable(self.on_step):
            given = type(self.on_step).__name__
            raise ValueError(f"on_step must be callable, got {given}: give a function of one StepSummary")
        checked = check_reducer(reducer)
        check_scaler(self.scaler, checked)
        return scoped(self._split(checked, trained), self.scope)

    def described(self, reducer: Reducer) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""
        same = {"scope": self.scope, "clip": self.clip, "clip_norm": self.clip_norm}
        return compared_with(reducer) | same | {"scaler": "none" if scale_of(self.scaler) is None else "used"}

    def _split(self, reducer: Reducer, trained: Mapping[str, Tensor]) -> Reducer:
        if self.only is not None or self.dense is not None or self.start_step:
            if any(isinstance(layer, Split) for layer in layers(reducer)):
                raise ValueError(
                    "reducer split says what is dense, so attach must not: leave out only, dense and start_step"
                )
            reducer = Split(
                reducer=reducer,
                only=_patterns(self.only, "only", trained),
                dense=_patterns(self.dense, "dense", trained),
                start_step=self.start_step,
            )
        reducer.check_parameters({name: tuple(real(parameter).shape) for name, parameter in trained.items()})
        return reducer


def compared_with(reducer: Reducer) -> dict[str, Any]:
    """Return what must be equal on all ranks with this reducer."""
    needs_threads = any(layer.depends_on_threads for layer in layers(reducer))
    return {"reducer": reducer} | ({"number of torch's threads": torch.get_num_threads()} if needs_threads else {})


def _patterns(choice: Choice | None, setting: str, parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    if choice is None:
        return ()
    if not callable(choice):
        patterns = as_patterns(choice, setting)
    else:
        patterns = tuple(escape(name) for name, parameter in parameters.items() if choice(name, parameter))
    if not patterns:
        raise ValueError(f"{setting} chooses none of the model's trained parameters: leave it out, or choose others")
    return patterns


def check_one_vector(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if ``tensors`` cannot be one vector, which scope=model needs."""
    parts = list(tensors)
    numel = sum(part.numel() for part in parts)
    if len({part.dtype for part in parts}) > 1:
        raise ValueError("scope=model needs parameters of one dtype, which this model has not: use scope=bucket")
    if numel > flat.MAX_NUMEL:
        raise ValueError(
            f"scope=model selects in one vector, this rank has {numel} elements and indices (int32) count "
            f"{flat.MAX_NUMEL}: use scope=bucket"
        )
