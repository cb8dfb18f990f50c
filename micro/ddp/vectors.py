"""The vectors in which one of DDP's buckets is reduced: one, as a rule."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from micro import flat
from micro.flat import Layout, real


class BucketVectors:
    """Cuts buckets into vectors; what follows from a bucket's parameters alone is worked out once.

    Args:
        names: of the model's parameters.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._kept_alive = tuple(names)  # an id stands for its parameter as long as that lives
        self._known: dict[object, tuple[tuple[str, ...], list[Layout]]] = {}

    def of(self, parameters: Sequence[Tensor], grad: Tensor) -> tuple[tuple[str, ...], list[tuple[Layout, Tensor]]]:
        """Return the names of a bucket's parameters, and what ``vectors_of`` returns for it."""
        key = tuple((id(parameter), parameter.shape, parameter.dtype) for parameter in parameters)
        if key not in self._known:
            named = {self._names[id(parameter)]: parameter for parameter in parameters}
            self._known[key] = tuple(named), layouts_of(named)
        names, layouts = self._known[key]
        return names, _cut(layouts, grad)


def vectors_of(parameters: Mapping[str, Tensor], grad: Tensor) -> list[tuple[Layout, Tensor]]:
    """Cut the bucket ``grad`` (numel,) of these parameters between parameters, where int32 indices cannot count it.

    Returns:
        the layout of each vector, and the vector: a view of ``grad``, the last one up to its end.
    """
    return _cut(layouts_of(parameters), grad)


def layouts_of(parameters: Mapping[str, Tensor]) -> list[Layout]:
    """Return the layouts of the vectors of a bucket with these parameters.

    DDP's first backward has one bucket for all parameters, of more than 2^31 - 1 elements in a large model. All ranks
    cut alike. A parameter without elements is in no vector, so a bucket of such parameters alone has none.
    """
    layouts: list[list[tuple[str, tuple[int, ...]]]] = []
    free = 0
    for name, parameter in parameters.items():
        values = real(parameter)
        if not values.numel():
            continue
        if values.numel() > free:
            layouts.append([])
            free = flat.MAX_NUMEL
        layouts[-1].append((name, tuple(values.shape)))
        free -= values.numel()
    return [Layout(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs)) for pairs in layouts]


def _cut(layouts: Sequence[Layout], grad: Tensor) -> list[tuple[Layout, Tensor]]:
    vectors, start = [], 0
    for number, layout in enumerate(layouts, 1):
        stop = start + layout.numel if number < len(layouts) else grad.numel()
        vectors.append((layout, grad[start:stop] if len(layouts) > 1 else grad))
        start = stop
    return vectors
