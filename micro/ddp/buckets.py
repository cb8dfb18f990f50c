"""DDP's buckets as the vectors in which they are reduced: one, as a rule."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from micro.values import flat
from micro.values.flat import Layout, real


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of DDP, or a part of one.

    Attributes:
        layout: of its gradients in the vector ``grad`` (numel,).
        buffer: what DDP gets back: ``grad``, or that of which it is a part.
        future: what DDP waits for; None where another part of the bucket follows.
    """

    layout: Layout
    grad: Tensor
    buffer: Tensor
    future: torch.futures.Future[Tensor] | None

    def check(self) -> None:
        """Raise ValueError unless the layout fits the vector: compiled loops would write beyond its end."""
        given, expected = self.grad.numel(), self.layout.numel
        if given != expected:
            raise ValueError(
                f"bucket of '{self.layout.names[0]}' holds {given} elements, its parameters {expected}: "
                "parameters must keep the shape and dtype that they had when DDP was built"
            )

    def put_back(self) -> None:
        """Give DDP its bucket, with the last part."""
        if self.future is not None and not self.future.done():
            self.future.set_result(self.buffer)


class Buckets:
    """Cuts DDP's buckets into vectors; what follows from a bucket's parameters alone is worked out once.

    Args:
        names: of the model's parameters.
        reduced: those that buckets will hold, as far as is known.

    Attributes:
        parameters: the ids of those, and of all that a bucket has held.
    """

    def __init__(self, names: Mapping[Tensor, str], reduced: Iterable[Tensor]) -> None:
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._kept_alive = tuple(names)  # an id stands for its parameter as long as that lives
        self.parameters = set(map(id, reduced))
        self._known: dict[object, tuple[tuple[str, ...], list[Layout]]] = {}

    def of(self, bucket: dist.GradBucket) -> tuple[tuple[str, ...], list[Layout]]:
        """Return the names of a bucket's parameters, and the layouts of its vectors."""
        parameters = bucket.parameters()
        key = tuple([(id(parameter), parameter.shape, parameter.dtype) for parameter in parameters])
        if key not in self._known:
            named = {self._names[id(parameter)]: parameter for parameter in parameters}
            self.parameters.update(map(id, parameters))
            self._known[key] = tuple(named), layouts_of(named)
        return self._known[key]


def layouts_of(parameters: Mapping[str, Tensor]) -> list[Layout]:
    """Return the layouts of the vectors of a bucket with these parameters.

    DDP's first backward has one bucket for all parameters, of more than 2^31 - 1 elements in a large model, which int32
    indices cannot count: it is cut between parameters, on all ranks alike. A parameter without elements is in no
    vector, so a bucket of such parameters alone has none.
    """
    layouts: list[dict[str, tuple[int, ...]]] = []
    free = 0
    for name, parameter in parameters.items():
        values = real(parameter)
        if not values.numel():
            continue
        if values.numel() > free:
            layouts.append({})
            free = flat.MAX_NUMEL
        layouts[-1][name] = tuple(values.shape)
        free -= values.numel()
    return [Layout(tuple(shapes), tuple(shapes.values())) for shapes in layouts]


def parts_of(layouts: list[Layout], grad: Tensor, future: torch.futures.Future[Tensor]) -> list[Bucket]:
    """Return the parts of a bucket's ``grad`` (numel,) with these layouts, views of it; the last goes up to its end."""
    parts, start = [], 0
    for number, layout in enumerate(layouts, 1):
        is_last = number == len(layouts)
        vector = grad if len(layouts) == 1 else grad[start : grad.numel() if is_last else start + layout.numel]
        parts.append(Bucket(layout, vector, grad, future if is_last else None))
        start += layout.numel
    return parts
