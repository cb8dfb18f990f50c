"""The vectors in which one of DDP's buckets is reduced: one, as a rule."""

from collections.abc import Mapping

from torch import Tensor

from micro import flat
from micro.flat import Layout, real


def vectors_of(parameters: Mapping[str, Tensor], grad: Tensor) -> list[tuple[Layout, Tensor]]:
    """Cut the bucket ``grad`` (numel,) of these parameters between parameters, where int32 indices cannot count it.

    DDP's first backward has one bucket for all parameters, of more than 2^31 - 1 elements in a large model. All ranks
    cut alike. A parameter without elements is in no vector, so a bucket of such parameters alone has none.

    Returns:
        the layout of each vector, and the vector: a view of ``grad``, the last one up to its end.
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
    vectors, start = [], 0
    for number, pairs in enumerate(layouts, 1):
        layout = Layout(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))
        stop = start + layout.numel if number < len(layouts) else grad.numel()
        vectors.append((layout, grad[start:stop] if len(layouts) > 1 else grad))
        start = stop
    return vectors
