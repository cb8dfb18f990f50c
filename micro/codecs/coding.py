"""Encode and decode values for exchanges, in one pass of compiled loops if possible, otherwise in torch.

Both return the same bits, except for means over a number of messages that is not a power of two, on a GPU.
"""

from types import ModuleType

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.base import Codec, Key
from micro.codecs.messages import Messages
from micro.kernels.reference import first_nonfinite
from micro.values.finite import Finite, all_finite, index_of


def encode(codec: Codec, values: Tensor, key: Key) -> Tensor:
    """Return the message of ``values`` (count,), which may be empty; see Codec."""
    if not values.numel():
        return values.new_empty(0, dtype=torch.uint8)
    loops = _loops(codec, values)
    if loops is None:
        return codec.encode(values, key)
    wire = torch.empty(codec.num_bytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device)
    loops.encode(codec.code, values, wire, key)
    return wire


def decode(codec: Codec, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the ``count`` values of a message, which may be empty; see Codec."""
    if not count:
        return wire.new_empty(0, dtype=dtype)
    values = None if codec.code is None else torch.empty(count, dtype=dtype, device=wire.device)
    loops = _loops(codec, values)
    if loops is None or values is None:
        return codec.decode(wire, count, dtype)
    loops.decode(codec.code, wire[None], values)
    return values


def encode_(
    codec: Codec, values: Tensor, key: Key, wire: Tensor, rest: Tensor | None = None, *, grad: Tensor | None = None
) -> int | None:
    """Fill ``wire`` (num_bytes,) with the message of ``values``, and ``rest`` with the rounding error.

    Args:
        rest: (count,) becomes ``values - decoded``; it may share memory with ``values``.
        grad: (count,) is first added to the values, as by `micro.kernels.absorb_`; it is overwritten.

    Returns:
        the index of the first sum with the gradient that is not finite or too large, or None.
    """
    loops = _loops(codec, values, rest)
    first_bad, grad = _add_unless_fused(codec if loops else None, values, grad)
    if loops is not None:
        found: int | None = loops.encode(codec.code, values, wire, key, rest, grad)
        return first_bad if grad is None else found
    wire.copy_(encode(codec, values, key))
    if rest is not None:
        torch.sub(values, decode(codec, wire, values.numel(), values.dtype), out=rest)
    return first_bad


def decode_mean_(codec: Codec, wires: Tensor, values: Tensor, divisor: float = 1.0) -> Finite:
    """Fill ``values`` (count,) with the sum of R decoded messages, in order, divided by ``divisor``.

    Args:
        wires: (R, num_bytes or more) uint8.

    Returns:
        whether all of them are finite; on an accelerator, a tensor.
    """
    loops, count = _loops(codec, values), values.numel()
    if loops is not None:
        is_finite: Finite = loops.decode(codec.code, wires, values, divisor)
        return is_finite
    for row, wire in enumerate(wires[:, : codec.num_bytes(count, values.dtype)]):
        decoded = decode(codec, wire, count, values.dtype)
        values.copy_(decoded) if row == 0 else values.add_(decoded)
    if divisor != 1:
        values.div_(divisor)
    return first_nonfinite(values) is None if values.device.type == "cpu" else torch.isfinite(values).all()


def encode_mean_(
    codec: Codec,
    values: Tensor,
    wires: Tensor,
    key: Key,
    wire: Tensor,
    mean: Tensor,
    rest: Tensor | None = None,
    *,
    grad: Tensor | None = None,
) -> tuple[Finite, int | None]:
    """Fill ``wire`` (num_bytes,) with the encoded mean of the values and of R messages.

    Args:
        values: (count,); ``grad`` is added to them, as in `encode_`.
        wires: (R, num_bytes) uint8; R may be 0.
        mean: (count,) becomes the decoded mean; it may share memory with ``grad``, not with ``values``.
        rest: (count,) becomes R + 1 times the rounding error of the mean.

    Returns:
        whether ``mean`` is finite, and what `encode_` returns.
    """
    loops, n = _loops(codec, values, mean, rest), wires.shape[0] + 1
    first_bad, grad = _add_unless_fused(codec if loops else None, values, grad)
    if loops is not None:
        is_finite, found = loops.encode_mean(codec.code, values, wires, wire, key, mean, rest, grad)
        return is_finite, first_bad if grad is None else found
    if n > 1:
        decode_mean_(codec, wires, mean)
        mean.add_(values).div_(n)
    else:
        mean.copy_(values)
    encode_(codec, mean, key, wire, rest)
    if rest is not None:
        rest.mul_(n)
    return decode_mean_(codec, wire[None], mean), first_bad


def encode_others_(
    codec: Codec,
    values: Tensor,
    key: Key,
    wire: Tensor,
    messages: Messages,
    own: int,
    rest: Tensor | None = None,
    *,
    grad: Tensor | None = None,
) -> int | None:
    """Encode each part of the values except ``own`` separately; see `encode_`.

    Args:
        key: the number of each part is appended to it.
        wire: becomes their messages, one after the other, without that of ``own``.
    """
    bads = []
    for place, part, message in messages.others(own, has_own=False):
        left, added = (None if vector is None else vector[part] for vector in (rest, grad))
        bad = encode_(codec, values[part], (*key, place), wire[message], left, grad=added)
        bads += [] if bad is None else [part.start + bad]
    return min(bads, default=None)


def decode_others_(codec: Codec, wires: Tensor, messages: Messages, own: int, values: Tensor) -> Finite:
    """Decode the messages ``wires`` of all parts into ``values``, except for the part ``own``.

    Returns:
        whether all decoded values are finite; on an accelerator, a tensor.
    """
    parts = messages.others(own, has_own=True)
    return all_finite([decode_mean_(codec, wires[None, wire], values[part]) for _, part, wire in parts])


def _loops(codec: Codec, *vectors: Tensor | None) -> ModuleType | None:
    """Return `micro.kernels.codes` if it supports the codec and these vectors, otherwise None."""
    given = [vector for vector in vectors if vector is not None]
    return kernels.codes_for(codec.code, *given) if given and given[0].numel() else None


def _add_unless_fused(codec: Codec | None, values: Tensor, grad: Tensor | None) -> tuple[int | None, Tensor | None]:
    """Return the gradient if the loops add it; otherwise add it and return the index of the first bad sum."""
    if grad is None or (codec is not None and _loops(codec, grad) is not None):
        return None, grad
    return index_of(kernels.absorb_(values, grad), values.numel()), None
