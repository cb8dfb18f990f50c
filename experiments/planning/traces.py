"""Measured traces of a model: when its gradients become ready in a step without communication."""

import math
from dataclasses import dataclass
from typing import ClassVar

from experiments.planning.documents import Document
from micro.values.flat import Layout


@dataclass(frozen=True, slots=True)
class Layer:
    """One parameter of a model, in the order of backward.

    Attributes:
        num_bytes: of its gradient.
        ready_s: when its gradient is complete, in seconds from the start of backward.
        used_s: when forward first needs it, in seconds from the start of forward; None if not measured.
        shape: of the parameter; None if unknown, as for merged parameters.

    Raises:
        ValueError: no bytes, or not a multiple of the number of elements.
    """

    name: str
    num_bytes: int
    ready_s: float
    used_s: float | None = None
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        numel = math.prod(self.shape or ())
        if self.num_bytes < 1 or numel < 1 or self.num_bytes % numel:
            of_shape = f" and a multiple of the elements of {list(self.shape)}" if self.shape else ""
            raise ValueError(f"num_bytes of '{self.name}' must be at least 1{of_shape}, got {self.num_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Document):
    """The times of one training step of a model without communication.

    Attributes:
        layers: its parameters in the order in which their gradients become ready.
        forward_s, backward_s, update_s: durations of the step's parts; backward_s is at least the last ready_s.
        element_bytes: of one number of a gradient.
        batch_size: per worker; 0 if unknown.
        world_size: workers that computed concurrently in the measurement.
        device: of the measurement.
        num_steps: steps behind each median.

    Raises:
        ValueError: no layers, repeated names, sizes that are not whole elements, or times out of order.
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
        for name in ("element_bytes", "world_size", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.layers or len({layer.name for layer in self.layers}) < len(self.layers):
            raise ValueError("layers must be one or more, each with a name of its own")
        before = 0.0
        for layer in self.layers:
            if layer.num_bytes % self.element_bytes:
                size = self.element_bytes
                raise ValueError(f"num_bytes of '{layer.name}' must be a multiple of {size}, got {layer.num_bytes}")
            if layer.ready_s < before:
                raise ValueError(f"ready_s of '{layer.name}' must not be before {before}, got {layer.ready_s}")
            before = layer.ready_s
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
        """The parameters in the order of backward; None if the shape of one is unknown."""
        shapes = [layer.shape for layer in self.layers if layer.shape is not None]
        if len(shapes) < len(self.layers):
            return None
        return Layout(tuple(layer.name for layer in self.layers), tuple(shapes))

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.update_s
