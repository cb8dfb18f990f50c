"""Save states in the logical order of each parameter's elements, independent of the memory format.

DDP's buckets hold gradients in the parameters' memory order, which for channels_last is not the logical one. A state
may be loaded by a model with another memory format.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def logical(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a saved bucket whose elements lie as in ``parameters`` with them in logical order."""

    def reordered(piece: Tensor, parameter: Tensor) -> Tensor:
        order = _order(parameter)
        back = sorted(range(len(order)), key=lambda dim: order[dim])
        return piece.view([parameter.shape[dim] for dim in order]).permute(back).reshape(-1)

    reordered_bucket: dict[str, Any] = _changed(bucket, _out_of_order(bucket, parameters), reordered)
    return reordered_bucket


def as_in_memory(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a saved bucket in logical order with its elements as they lie in ``parameters``."""
    others = _out_of_order(bucket, parameters)
    placed: dict[str, Any] = _changed(
        bucket, others, lambda piece, p: piece.view(p.shape).permute(_order(p)).reshape(-1)
    )
    return placed


def orders_of_shards(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the order of dimensions, largest stride first, of parameters of which a saved bucket holds a part alone.

    A part of the elements in one order is no part in another: such a state goes only to a model in the same format.
    """
    others = _out_of_order(bucket, parameters)
    kept = [(name, piece) for pieces in bucket["memory"].values() for name, piece in pieces.items() if name in others]
    return {name: _order(others[name]) for name, piece in kept if piece.numel() != others[name].numel()}


def _order(parameter: Tensor) -> list[int]:
    """Return the dimensions of a parameter, the one of the largest stride first."""
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda dim: -strides[dim])


def _out_of_order(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a bucket that are dense in memory, but in another order than the logical one."""
    own = {name: parameters[name] for name in bucket["shapes"]}
    return {n: p for n, p in own.items() if not p.is_contiguous() and p.permute(_order(p)).is_contiguous()}


def _changed(
    value: Any, others: Mapping[str, Tensor], change: Callable[[Tensor, Tensor], Tensor], name: str = ""
) -> Any:
    """Change the vectors of these parameters in ``value``, by whose names they are, at any depth of dictionaries."""
    if isinstance(value, dict) and others:
        return {key: _changed(each, others, change, key) for key, each in value.items()}
    is_vector = name in others and isinstance(value, Tensor) and value.shape == (others[name].numel(),)
    return change(value, others[name]) if is_vector else value
