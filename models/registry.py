"""Models by name: each file of this package registers what it holds."""

import difflib
import inspect
from collections.abc import Callable
from typing import TypeVar

from torch import nn

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

_BUILDERS: dict[str, Callable[..., nn.Module]] = {}


def register(builder: Builder) -> Builder:
    """Register a function ``(*, in_channels, num_classes, **settings) -> nn.Module`` under its own name."""
    name = builder.__name__
    if name in _BUILDERS:
        raise ValueError(f"model '{name}' is registered twice: rename one of the two functions")
    _BUILDERS[name] = builder
    return builder


def names() -> list[str]:
    """Return the names that `build` knows, sorted."""
    return sorted(_BUILDERS)


def build(name: str, *, in_channels: int, num_classes: int, **settings: object) -> nn.Module:
    """Build a model; its weights follow torch's global generator, so seed that first.

    Args:
        name: one of `names()`.
        in_channels: channels of the input images, at least 1.
        num_classes: width of the output, at least 1.
        settings: what this model can be told beyond that, such as ``hidden`` of the mlp.
    Returns:
        a module that maps (batch, in_channels, height, width) float32 to (batch, num_classes) logits.
    Raises:
        ValueError: the name, a setting or a value is not one that exists.
    """
    builder = _builder(name)
    positive(in_channels=in_channels, num_classes=num_classes)
    _check_settings(name, builder, settings)
    return builder(in_channels=in_channels, num_classes=num_classes, **settings)


def positive(**values: object) -> None:
    """Raise ValueError unless every value is an integer of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _builder(name: str) -> Callable[..., nn.Module]:
    if name in _BUILDERS:
        return _BUILDERS[name]
    close = difflib.get_close_matches(str(name), names(), n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ValueError(f"model must be one of {', '.join(names())}, got '{name}'{hint}")


def _check_settings(name: str, builder: Callable[..., nn.Module], settings: dict[str, object]) -> None:
    allowed = [key for key in inspect.signature(builder).parameters if key not in ("in_channels", "num_classes")]
    unknown = [key for key in settings if key not in allowed]
    if unknown:
        allows = f"allows only {', '.join(allowed)}" if allowed else "has no settings"
        raise ValueError(f"model '{name}' {allows}, got '{', '.join(unknown)}'")
