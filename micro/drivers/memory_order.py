"""Saved states in the logical order of each parameter's elements, whatever the order in which they lie in memory.

DDP's buckets hold gradients as the parameters lie: one in channels_last has its elements in another order than its
shape says. A state may be loaded by a model in another memory format.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Piece = Callable[[Tensor, Tensor], Tensor]


def logical(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a saved bucket whose elements lie as in ``parameters`` with them in logical order."""
    changed: dict[str, Any] = _reordered(bucket, _in_other_orders(bucket, parameters), _to_logical)
    return changed


def as_in_memory(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a saved bucket in logical order with its elements as they lie in ``parameters``."""
    changed: dict[str, Any] = _reordered(bucket, _in_other_orders(bucket, parameters), _to_memory)
    return changed


def _in_other_orders(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a bucket that are dense in memory, but in another order than the logical one."""
    named = {name: parameters[name] for name in bucket["shapes"]}
    others = {name: p for name, p in named.items() if not p.is_contiguous()}
    return {name: p for name, p in others.items() if p.permute(_order(p)).is_contiguous()}


def _order(parameter: Tensor) -> list[int]:
    """Return the dimensions of a parameter, the one of the largest stride first."""
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda dim: -strides[dim])


def _reordered(value: Any, parameters: Mapping[str, Tensor], change: Piece) -> Any:
    """Change all vectors of a parameter's elements in nested dictionaries, which hold them by its name."""
    if not parameters or not isinstance(value, dict):
        return value
    return {
        key: change(each, parameters[key])
        if key in parameters and isinstance(each, Tensor) and each.shape == (parameters[key].numel(),)
        else _reordered(each, parameters, change)
        for key, each in value.items()
    }


def _to_logical(piece: Tensor, parameter: Tensor) -> Tensor:
    order = _order(parameter)
    back = sorted(range(len(order)), key=lambda dim: order[dim])
    return piece.view([parameter.shape[dim] for dim in order]).permute(back).reshape(-1)


def _to_memory(piece: Tensor, parameter: Tensor) -> Tensor:
    return piece.view(parameter.shape).permute(_order(parameter)).reshape(-1)
