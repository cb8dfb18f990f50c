"""Average encoded values over the ranks when all ranks hold the same indices."""

import torch
from torch import Tensor

from micro.codecs import coding
from micro.codecs.base import Codec
from micro.codecs.messages import part_messages
from micro.comm.requests import AllGatherLists, AllToAll, Fill, Reduction
from micro.exchanges.base import Transport
from micro.exchanges.header import gather_header, header_call
from micro.predicted_traffic import Calls
from micro.values.finite import Finite, all_finite
from micro.values.sparse import equal_slices

MeanChecks = tuple[Finite, Finite, int | None]
"""Whether all gradients were finite, and whether the mean is, equal on all ranks. Then, if a gradient was added, the
index of this rank's first sum that is not finite or too large."""


def mean_encoded_(
    values: Tensor,
    transport: Transport,
    *,
    rest: Tensor | None,
    mean: Tensor,
    memory: Tensor | None = None,
    grad: Tensor | None = None,
) -> Reduction[MeanChecks]:
    """Average encoded values: scatter them, add in full precision, share the encoded means.

    An all-reduce of encoded values would round at every hop, and no rank would know the error. Here each rank owns a
    part: it adds the others' decoded values to its own exact ones, in rank order, encodes the mean, and keeps the
    rounding error in its residual. The bytes are those of an all-reduce of the encoded values.

    Args:
        values: (k,) may share memory with ``mean``.
        rest: (k,) if given, becomes the part of the values that this rank did not send.
        mean: (k,) becomes the mean, equal bit for bit on all ranks.
        memory: (at least `message_bytes`,) uint8 for the messages.
        grad: (k,) is added to the values while they are encoded, and overwritten; may share memory with ``mean``.
    """
    comm, codec, key = transport.comm, transport.wire.values, transport.key
    n, rank, numel = comm.world_size, comm.rank, values.numel()
    bare, flagged = part_messages(numel, n, codec, values.dtype)
    start, stop = equal_slices(numel, n)[rank]
    own_size = bare.sizes[rank]
    memory = torch.empty(bare.num_bytes + 1, dtype=torch.uint8, device=values.device) if memory is None else memory
    leaving, message = memory[: bare.num_bytes - own_size], memory[bare.num_bytes - own_size : bare.num_bytes + 1]
    in_others = coding.encode_others_(codec, values, key, leaving, bare, rank, rest, grad=grad)
    sizes = [0 if other == rank else size for other, size in enumerate(bare.sizes)]
    coming = [0 if other == rank else own_size for other in range(n)]
    arrived = yield AllToAll(mine=leaving, sizes=sizes, received=coming, kind="values")
    mine, own_mean = values[start:stop], mean[start:stop]
    if mine.data_ptr() == own_mean.data_ptr():
        mine = mine.clone()
    own_rest, own_grad = (None if vector is None else vector[start:stop] for vector in (rest, grad))
    received, to_all = arrived.view(n - 1, own_size), (*key, n)
    fits, in_own = coding.encode_mean_(codec, mine, received, to_all, message[:-1], own_mean, own_rest, grad=own_grad)
    bads = (in_others, None if in_own is None else start + in_own)
    first_bad = min((bad for bad in bads if bad is not None), default=None)
    message[-1] = transport.step.is_finite if first_bad is None else False
    wires = yield AllGatherLists(mine=message, counts=flagged.sizes, kind="values")

    def decode_others() -> tuple[Finite, Finite]:
        fit = coding.decode_others_(codec, wires, flagged, rank, mean)
        flags = flagged.last_bytes(wires)
        return all(flags.tolist()) if flags.is_cpu else flags.all(), all_finite([fits, fit])

    is_finite, fits = yield Fill(into=mean, work=decode_others)
    return is_finite, fits, first_bad


def mean_gathered_(
    values: Tensor,
    transport: Transport,
    *,
    rest: Tensor | None,
    mean: Tensor,
    memory: Tensor | None = None,
    grad: Tensor | None = None,
) -> Reduction[MeanChecks]:
    """Average encoded values by an all-gather of all ranks' values; arguments as in `mean_encoded_`."""
    codec, n, count = transport.wire.values, transport.comm.world_size, values.numel()
    size = codec.num_bytes(count, values.dtype)
    wire = torch.empty(size, dtype=torch.uint8, device=values.device) if memory is None else memory[:size]
    first_bad = coding.encode_(codec, values, transport.key, wire, rest, grad=grad)
    is_finite = transport.step.is_finite if first_bad is None else False
    header = yield from gather_header(values, is_finite=is_finite, counts=(count,) * n)
    wires = (yield AllGatherLists(mine=wire, counts=[size] * n, kind="values")).view(n, size)
    fits = yield Fill(into=mean, work=lambda: coding.decode_mean_(codec, wires, mean, n))
    return header.is_finite, fits, first_bad


def message_bytes(numel: int, transport: Transport, dtype: torch.dtype) -> int:
    """Return the bytes of `mean_encoded_`'s messages for ``numel`` values."""
    return part_messages(numel, transport.comm.world_size, transport.wire.values, dtype)[0].num_bytes + 1


def mean_calls(codec: Codec, count: float, world_size: int, dtype: torch.dtype) -> Calls:
    """Return the collectives of a mean of ``count`` values: one all-reduce, or those of `mean_encoded_`."""
    if codec.lossless:
        return (("all_reduce", (round(count) + 1) * dtype.itemsize),)
    part = codec.num_bytes(round(count / world_size), dtype)
    return ("scatter", (world_size - 1) * part), ("gather_lists", part + 1)


def gathered_calls(codec: Codec, count: float, world_size: int, dtype: torch.dtype) -> Calls:
    """Return the collectives of `mean_gathered_`."""
    return header_call(), ("gather_lists", codec.num_bytes(round(count), dtype))
