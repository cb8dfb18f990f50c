"""Save states in the logical order of each parameter's elements, independent of the memory format.

DDP's buckets hold gradients in the parameters' memory order, which for channels_last is not the logical one. A state
may be loaded by a model with another memory format.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def logical(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the bucket in logical order; ``bucket`` has the memory order of ``parameters``."""

    def reordered(piece: Tensor, parameter: Tensor) -> Tensor:
        order = _order(parameter)
        back = sorted(range(len(order)), key=lambda dim: order[dim])
        return piece.view([parameter.shape[dim] for dim in order]).permute(back).reshape(-1)

    reordered_bucket: dict[str, Any] = _changed(bucket, _out_of_order(bucket, parameters), reordered)
    return reordered_bucket


def as_in_memory(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the bucket in the memory order of ``parameters``; ``bucket`` has logical order."""
    others = _out_of_order(bucket, parameters)
    placed: dict[str, Any] = _changed(
        bucket, others, lambda piece, p: piece.view(p.shape).permute(_order(p)).reshape(-1)
    )
    return placed


def orders_of_shards(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the dimensions, by falling stride, of parameters of which a saved bucket holds only a shard.

    Such a state can only be loaded by a model in the same memory format: in another one, the shard has other elements.
    """
    others = _out_of_order(bucket, parameters)
    kept = [(name, piece) for pieces in bucket["memory"].values() for name, piece in pieces.items() if name in others]
    return {name: _order(others[name]) for name, piece in kept if piece.numel() != others[name].numel()}


def _order(parameter: Tensor) -> list[int]:
    """Return the dimensions of a parameter, by falling stride."""
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda dim: -strides[dim])


def _out_of_order(bucket: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a bucket that are dense, but not in logical order."""
    own = {name: parameters[name] for name in bucket["shapes"]}
    return {n: p for n, p in own.items() if not p.is_contiguous() and p.permute(_order(p)).is_contiguous()}


def _changed(
    value: Any, others: Mapping[str, Tensor], change: Callable[[Tensor, Tensor], Tensor], name: str = ""
) -> Any:
    """Return ``value``, nested dictionaries, with ``change`` applied to the vectors named like ``others``."""
    if isinstance(value, dict) and others:
        return {key: _changed(each, others, change, key) for key, each in value.items()}
    is_vector = name in others and isinstance(value, Tensor) and value.shape == (others[name].numel(),)
    return change(value, others[name]) if is_vector else value
