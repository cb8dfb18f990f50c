"""The registry of models: each file of this package registers its models by name."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import nn

# The kind of data of a model determines its call:
#   images        (batch, in_channels, height, width) float32 -> (batch, num_classes) logits
#   text          (batch, steps) int64 words, and the carry or None -> (batch, steps, num_words) logits of the words
#                 that follow, and the new carry: a tuple of tensors whose second dimension is the batch
#   masked_text   (batch, steps) int64 words -> (batch, steps, num_words) logits of the words at these positions
#   interactions  (batch,) users and (batch,) items -> (batch,) logits
Kind = Literal["images", "text", "masked_text", "interactions"]

# Sizes that come from the data set; all other arguments of a builder are settings.
SIZES = (
    *("in_channels", "num_classes", "image_size"),
    *("num_words", "num_characters", "word_length"),
    *("num_users", "num_items"),
)

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: Kind
    build: Callable[..., nn.Module]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.build).parameters


_ENTRIES: dict[str, _Entry] = {}


def register(kind: Kind) -> Callable[[Builder], Builder]:
    """Register a function ``(*, sizes..., settings...) -> nn.Module`` under its own name.

    It needs those sizes of ``SIZES`` that are among its arguments.
    """

    def enter(builder: Builder) -> Builder:
        name = builder.__name__
        if name in _ENTRIES:
            raise ValueError(f"model '{name}' is registered twice: rename one of the two functions")
        _ENTRIES[name] = _Entry(kind, builder)
        return builder

    return enter


def names() -> list[str]:
    """Return the names of all models, sorted."""
    return sorted(_ENTRIES)


def kind_of(name: str) -> Kind:
    """Return the kind of data that a model learns from.

    Raises:
        ValueError: no such model.
    """
    return _entry(name).kind


def build(name: str, *, sizes: Mapping[str, int], **settings: object) -> nn.Module:
    """Build a model. Its weights are drawn from torch's global generator, so seed that first.

    Args:
        name: one of `names()`.
        sizes: of the data set, such as in_channels and num_classes, each at least 1; extra ones are ignored.
        settings: of this model, such as ``hidden`` of the mlp.
    Returns:
        a module; its kind determines how it is called.
    Raises:
        ValueError: the name, a setting or a value is unknown, or a needed size is missing.
    """
    entry = _entry(name)
    needed = [size for size in SIZES if size in entry.parameters]
    missing = [size for size in needed if size not in sizes]
    if missing:
        has = ", ".join(sizes) or "nothing"
        raise ValueError(f"model '{name}' is for {entry.kind} and needs {missing[0]}, the data set has {has}")
    chosen = {size: sizes[size] for size in needed}
    positive(**chosen)
    _check_settings(name, entry, settings)
    return entry.build(**chosen, **settings)


def positive(**values: object) -> None:
    """Raise ValueError unless every value is an integer of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def probability(**values: object) -> None:
    """Raise ValueError unless every value is a number in [0, 1)."""
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def _entry(name: str) -> _Entry:
    if name in _ENTRIES:
        return _ENTRIES[name]
    close = difflib.get_close_matches(str(name), names(), n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ValueError(f"model must be one of {', '.join(names())}, got '{name}'{hint}")


def _check_settings(name: str, entry: _Entry, settings: Mapping[str, object]) -> None:
    allowed = [key for key in entry.parameters if key not in SIZES]
    unknown = [key for key in settings if key not in allowed]
    if unknown:
        allows = f"allows only {', '.join(allowed)}" if allowed else "has no settings"
        raise ValueError(f"model '{name}' {allows}, got '{', '.join(unknown)}'")
