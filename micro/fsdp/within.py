"""Quantised gradients in FSDP2's own reduce-scatter: codes travel in an all-to-all, and each owner adds them up."""

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
WORD = 4  # bytes: messages are multiples of it, so that the scales in them can be read in place


def attach_within(model: nn.Module, codec: Codec | str | Mapping[str, Any]) -> "QuantizedReduceScatter":
    """Send the gradients of a model of ``fully_shard`` as codes of 8 or 16 bits, in FSDP's own reduce-scatter.

        fully_shard(model, mesh=mesh)
        micro.fsdp.attach_within(model, micro.Int8())

    Each rank encodes the pieces of its gradient that other ranks own and sends each to its owner, which adds them up in
    single precision (float64 gradients in double) and divides by the number of ranks. All else is FSDP's: replicas of a
    mesh of two dimensions, micro-batches, unused parameters, clipping, checkpoints. Nothing is kept between steps: the
    rounding is lost, as it is in a ``reduce_dtype`` of bfloat16.

    If a rank's piece has a NaN, an Inf or a value of 2^127 or more, the owner's gradient of that whole piece becomes
    NaN. A loss scaler then skips the step, as with FSDP alone.

    Call it once on all ranks, after fully_shard and before the first backward. On one rank nothing is sent.

    Args:
        codec: BFloat16, Int8 or FP8, or what ``micro.build`` makes one of: "int8", {"name": "int8", "block": 64}.

    Returns:
        what counts the bytes, and whose ``close()`` gives FSDP its own reduce-scatter back.

    Raises:
        ValueError: on all ranks: another codec, or different ones; torch lacks FSDPModule.set_custom_reduce_scatter;
            the model is not one of fully_shard, has a module with parameters on several meshes, or has another
            reduce-scatter than FSDP's.
    """
    with meeting("micro.fsdp.attach_within", lambda: None) as entry:
        chosen = _checked(codec)
        groups = shard_groups(model)
        for group in groups:
            group.check_reduce_scatter()
        entry.settings |= {"codec": chosen}
    return QuantizedReduceScatter(groups, chosen)


def _checked(codec: Any) -> Codec:
    """Return the codec, or raise ValueError where its errors need a residual, or it is none."""
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
    """The reduce-scatter of a sharded model, in codes. Build it with ``attach_within``; a context manager.

    It has the methods of torch's ``ReduceScatter``, which FSDP calls once for each module whose gradient is ready.

    Attributes:
        codec: the form of the values.
        bytes_sent: by this rank, since it was attached.
        fsdp_bytes: what FSDP's own reduce-scatter sends of the same gradients, at best.
    """

    def __init__(self, groups: Sequence[ShardGroup], codec: Codec) -> None:
        self.codec = codec
        self.bytes_sent = self.fsdp_bytes = 0.0
        self._num_calls = 0
        self._replaced = [(group, group.set_reduce_scatter(self)) for group in groups]

    def close(self) -> None:
        """Let FSDP use its own reduce-scatter again; the bytes can still be read."""
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
            ValueError: the model has a gradient divide factor, which torch leaves to NCCL.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"attach_within sums or averages, and FSDP asks for {op}: after set_gradient_divide_factor call "
                "set_force_sum_reduction_for_comms(True)"
            )
        comm = GroupComm(group, timed=False)
        total = carried_out(scattered_sum(input_tensor, self.codec, (self._num_calls, comm.rank), comm), comm)
        output_tensor.copy_(total.div_(comm.world_size) if op == dist.ReduceOp.AVG else total)
        self._num_calls += 1
        self.bytes_sent += sum(comm.traffic.num_bytes.values())
        self.fsdp_bytes += input_tensor.nbytes * (comm.world_size - 1) / comm.world_size


def scattered_sum(grads: Tensor, codec: Codec, key: Key, comm: Comm) -> Reduction[Tensor]:
    """Add up, over the ranks, their pieces of this rank's shard: (shard,) in single precision, or double of doubles.

    The own piece needs no code. A message is a piece's codes, a byte that is 0 where the piece was not finite, and up
    to three more.

    Args:
        grads: (world_size * shard,) of this rank, a piece for each rank; not modified.
        key: for codes that are random.

    Returns:
        the sum; NaN all over where another rank's piece was not finite.
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
    """Return whether ``piece`` (count,) has no NaN, Inf or value that scales of blocks cannot hold: a flag, ()."""
    if not piece.numel():
        return piece.new_ones((), dtype=torch.bool)
    small: Tensor = torch.linalg.vector_norm(piece, torch.inf) < LARGEST
    return small
