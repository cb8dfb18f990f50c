"""Saved states in the logical order of each parameter's elements, whatever the order in which they lie in memory.

DDP's buckets hold gradients as the parameters lie: one in channels_last has its elements in another order than its
shape says. A state may be loaded by a model in another memory format.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def logical(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a saved bucket whose elements lie as in ``parameters`` with them in logical order."""
    return _reordered(bucket, parameters, _to_logical)


def as_in_memory(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a saved bucket in logical order with its elements as they lie in ``parameters``."""
    return _reordered(bucket, parameters, lambda piece, p: piece.view(p.shape).permute(_order(p)).reshape(-1))


def _to_logical(piece: Tensor, parameter: Tensor) -> Tensor:
    order = _order(parameter)
    back = sorted(range(len(order)), key=lambda dim: order[dim])
    return piece.view([parameter.shape[dim] for dim in order]).permute(back).reshape(-1)


def _order(parameter: Tensor) -> list[int]:
    """Return the dimensions of a parameter, the one of the largest stride first."""
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda dim: -strides[dim])


def _reordered(
    bucket: dict[str, Any], parameters: Mapping[str, Tensor], change: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Change the vectors of all parameters that are dense in memory, but in another order than the logical one."""
    others = {name: p for name in bucket["shapes"] if not (p := parameters[name]).is_contiguous()}
    others = {name: p for name, p in others.items() if p.permute(_order(p)).is_contiguous()}

    def changed(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):  # of vectors by the names of their parameters, at any depth
            return {key: changed(each, key) for key, each in value.items()}
        is_vector = name in others and isinstance(value, Tensor) and value.shape == (others[name].numel(),)
        return change(value, others[name]) if is_vector else value

    result: dict[str, Any] = changed(bucket) if others else bucket
    return result
