"""What was measured of a model: the times at which its gradients become ready in a step without communication."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from micro.flat import Layout
from micro.planning.documents import Document, check_number, check_whole, checked_fields


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter of a model, in the order of backward.

    Attributes:
        name: of the parameter.
        num_bytes: of its gradient.
        ready_s: when its gradient is complete, in seconds from the start of backward.
        used_s: when forward first needs it, in seconds from the start of forward; None where that was not measured.
        shape: of the parameter; None where it is not known, as of several that were joined.
    """

    name: str
    num_bytes: int
    ready_s: float
    used_s: float | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Document):
    """The times of one training step of a model without communication.

    Attributes:
        model: its name, for titles.
        layers: its parameters in the order in which their gradients become ready.
        forward_s, backward_s, update_s: lengths of the step's parts; backward_s is at least the last ready_s.
        element_bytes: of one number of a gradient.
        batch_size: per worker; 0 where it is not known.
        world_size: of workers that computed side by side when it was measured.
        device: what it was measured on.
        num_steps: over which medians were taken.

    Raises:
        ValueError: no layers, names that repeat, sizes or times that are negative or out of order.
    """

    format: ClassVar[str] = "micro-trace-1"
    model: str
    layers: tuple[Layer, ...]
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    element_bytes: int = 4
    batch_size: int = 0
    world_size: int = 1
    device: str = "unknown"
    num_steps: int = 1

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty: a trace needs at least one parameter")
        for name in ("forward_s", "backward_s", "update_s"):
            check_number(name, getattr(self, name), lowest=0.0)
        for name, lowest in (("element_bytes", 1), ("batch_size", 0), ("world_size", 1), ("num_steps", 1)):
            check_whole(name, getattr(self, name), lowest=lowest)
        seen: set[str] = set()
        before = 0.0
        for place, layer in enumerate(self.layers):
            at = f"layers[{place}] ('{layer.name}')"
            if not isinstance(layer.name, str) or not layer.name or layer.name in seen:
                raise ValueError(f"{at}: name must be a text that no other layer has")
            seen.add(layer.name)
            check_whole(f"{at}: num_bytes", layer.num_bytes, lowest=1)
            if layer.num_bytes % self.element_bytes:
                raise ValueError(f"{at}: num_bytes must be a multiple of {self.element_bytes}, got {layer.num_bytes}")
            check_number(f"{at}: ready_s", layer.ready_s, lowest=0.0)
            if layer.ready_s < before:
                raise ValueError(f"{at}: ready_s must not fall from layer to layer, got {layer.ready_s} after {before}")
            before = layer.ready_s
            if layer.used_s is not None:
                check_number(f"{at}: used_s", layer.used_s, lowest=0.0)
            _check_shape(at, layer)
        if self.backward_s < before:
            raise ValueError(f"backward_s must be at least the last ready_s {before}, got {self.backward_s}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def numel(self) -> int:
        """Number of elements of all gradients."""
        return self.num_bytes // self.element_bytes

    @property
    def layout(self) -> Layout | None:
        """The parameters in the order of backward; None where the shape of one is not known."""
        shapes = [layer.shape for layer in self.layers if layer.shape is not None]
        if len(shapes) < len(self.layers):
            return None
        return Layout(tuple(layer.name for layer in self.layers), tuple(shapes))

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.update_s

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Self:
        rows = values.pop("layers")
        if not isinstance(rows, list):
            raise ValueError(f"layers must be a list, got {type(rows).__name__}")
        checked = [checked_fields(Layer, row, f"layers[{place}]: ") for place, row in enumerate(rows)]
        return cls(layers=tuple(Layer(**{**row, "shape": _shape(row.get("shape"))}) for row in checked), **values)


def _shape(found: Any) -> Any:
    return tuple(found) if isinstance(found, list) else found


def _check_shape(at: str, layer: Layer) -> None:
    if layer.shape is None:
        return
    if not isinstance(layer.shape, tuple):
        raise ValueError(f"{at}: shape must be a list of whole numbers, got {layer.shape!r}")
    for size in layer.shape:
        check_whole(f"{at}: a number of its shape", size, lowest=1)
    if layer.num_bytes % math.prod(layer.shape):
        raise ValueError(f"{at}: {layer.num_bytes} bytes are no whole number for each element of {layer.shape}")
