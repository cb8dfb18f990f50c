"""Quantise FSDP2's own reduce-scatter: an all-to-all sends codes, and each owner sums them."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micro.codecs import coding
from micro.codecs.base import Codec, Key
from micro.codecs.blocks import LARGEST
from micro.codecs.fp8 import FP8
from micro.codecs.half import BFloat16
from micro.codecs.int8 import Int8
from micro.comm.group import GroupComm
from micro.comm.loop import carried_out
from micro.comm.ranks import Comm
from micro.comm.requests import AllToAll, Reduction
from micro.drivers.meeting import meeting
from micro.fsdp.groups import ShardGroup, shard_groups
from micro.parts import as_part
from micro.reducers.base import Reducer

CODECS = (BFloat16, Int8, FP8)
WORD = 4  # bytes; message sizes are multiples of it, so that scales are aligned


def attach_within(model: nn.Module, codec: Codec | str | Mapping[str, Any]) -> "QuantizedReduceScatter":
    """Send the gradients in FSDP's own reduce-scatter with 8 or 16 bits a value.

        fully_shard(model, mesh=mesh)
        micro.fsdp.attach_within(model, micro.Int8())

    Each rank encodes the pieces of its gradient that other ranks own and sends them to their owners. An owner sums in
    single precision (float64 gradients in double) and divides by the number of ranks. Everything else works as in FSDP:
    meshes of two dimensions, micro-batches, unused parameters, clipping, checkpoints. No residual is kept; rounding
    errors are lost, as with ``reduce_dtype=torch.bfloat16``.

    If a rank's piece has a NaN, an Inf or a value of 2^127 or more, the owner's whole piece becomes NaN. A loss scaler
    then skips the step, as with FSDP alone.

    Call it once on all ranks, after fully_shard and before the first backward. On one rank nothing is sent.

    Args:
        codec: BFloat16, Int8 or FP8, or a description for ``micro.build``: "int8", {"name": "int8", "block": 64}.

    Returns:
        an object that counts bytes; its ``close()`` restores FSDP's own reduce-scatter.

    Raises:
        ValueError: on all ranks: another codec, or different ones; torch lacks FSDPModule.set_custom_reduce_scatter;
            the model is not sharded by fully_shard, has a module with parameters on several meshes, or its
            reduce-scatter was replaced already.
    """
    with meeting("micro.fsdp.attach_within", lambda: None) as entry:
        chosen = _checked(codec)
        groups = shard_groups(model)
        for group in groups:
            group.check_reduce_scatter()
        entry.settings |= {"codec": chosen}
    return QuantizedReduceScatter(groups, chosen)


def _checked(codec: Any) -> Codec:
    """Return the codec. Raises ValueError if it is none, or needs a residual."""
    if isinstance(codec, Reducer):
        raise ValueError(
            f"attach_within no longer takes a reducer, got {codec.full_name}: give it a codec, micro.Int8(), or use "
            "micro.attach_fsdp between nodes"
        )
    chosen = as_part(Codec, codec)
    if not isinstance(chosen, CODECS):
        names = ", ".join(each.name for each in CODECS)
        raise ValueError(f"codec of attach_within must be one of {names}, got '{chosen.name}', which needs a residual")
    return chosen


class QuantizedReduceScatter:
    """A quantised reduce-scatter for a sharded model. Build it with ``attach_within``; a context manager.

    It implements torch's ``ReduceScatter``; FSDP calls it once for each module whose gradient is ready.

    Attributes:
        codec: of the values.
        bytes_sent: by this rank, since it was attached.
        fsdp_bytes: the least that FSDP's own reduce-scatter would have sent.
    """

    def __init__(self, groups: Sequence[ShardGroup], codec: Codec) -> None:
        self.codec = codec
        self.bytes_sent = self.fsdp_bytes = 0.0
        self._num_calls = 0
        self._replaced = [(group, group.set_reduce_scatter(self)) for group in groups]

    def close(self) -> None:
        """Restore FSDP's own reduce-scatter; the byte counts remain readable."""
        for group, own in self._replaced:
            group.set_reduce_scatter(own)
        self._replaced.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP's gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor`` (world_size * shard,) into ``output_tensor`` (shard,); FSDP's stream waits for it.

        Raises:
            ValueError: the model has a gradient divide factor, which only NCCL supports.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"attach_within sums or averages, and FSDP requests {op}: after set_gradient_divide_factor call "
                "set_force_sum_reduction_for_comms(True)"
            )
        comm = GroupComm(group, timed=False)
        total = carried_out(scattered_sum(input_tensor, self.codec, (self._num_calls, comm.rank), comm), comm)
        output_tensor.copy_(total.div_(comm.world_size) if op == dist.ReduceOp.AVG else total)
        self._num_calls += 1
        self.bytes_sent += sum(comm.traffic.num_bytes.values())
        self.fsdp_bytes += input_tensor.nbytes * (comm.world_size - 1) / comm.world_size


def scattered_sum(grads: Tensor, codec: Codec, key: Key, comm: Comm) -> Reduction[Tensor]:
    """Sum the ranks' pieces of this rank's shard: (shard,) in single precision, or double for float64.

    The rank's own piece is not encoded. A message consists of a piece's codes, a byte that is 0 if the piece was not
    finite, and up to three bytes of padding.

    Args:
        grads: (world_size * shard,) of this rank, a piece for each rank; not modified.
        key: seed of random rounding.

    Returns:
        the sum; all NaN if another rank's piece was not finite.
    """
    n, rank = comm.world_size, comm.rank
    pieces, dtype = grads.view(n, -1), torch.promote_types(grads.dtype, torch.float32)
    count = pieces.shape[1]
    num_bytes = codec.num_bytes(count, dtype)
    width = num_bytes + WORD - num_bytes % WORD
    leaving = grads.new_zeros((n - 1, width), dtype=torch.uint8)
    for wire, to in zip(leaving, (to for to in range(n) if to != rank), strict=True):
        wire[:num_bytes] = coding.encode(codec, pieces[to].to(dtype), (*key, to))
        wire[num_bytes] = is_finite(pieces[to])
    sizes = [0 if other == rank else width for other in range(n)]
    arrived = yield AllToAll(mine=leaving.view(-1), sizes=sizes, received=sizes, kind="values")
    received = arrived.view(n - 1, width)
    total: Tensor = pieces[rank].to(dtype, copy=True)
    for wire in received:
        total += coding.decode(codec, wire[:num_bytes], count, dtype)
    return total.masked_fill_((received[:, num_bytes] == 0).any(), torch.nan)


def is_finite(piece: Tensor) -> Tensor:
    """Return a flag (), whether ``piece`` (count,) has no NaN, Inf or value too large for the scale of a block."""
    if not piece.numel():
        return piece.new_ones((), dtype=torch.bool)
    small: Tensor = torch.linalg.vector_norm(piece, torch.inf) < LARGEST
    return small
