"""What an exchange is: HOW the chosen indices and values meet."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import Codec
from micro.comm import Comm
from micro.partition import equal_sizes
from micro.sparse import Exchanged, Overlap, Selection


class Exchange(ABC):
    """A way in which the ranks' selections become one mean update, equal bit for bit on all ranks."""

    name: ClassVar[str]
    accepts: ClassVar[frozenset[Overlap]]

    @abstractmethod
    def exchange(
        self, acc: Tensor, selection: Selection, overlap: Overlap, codec: Codec, comm: Comm, *, healthy: bool
    ) -> Exchanged:
        """Return the mean update and what this rank contributed to it.

        Args:
            acc: (numel,) gradient + residual. Not modified.
            selection: what this rank chose.
            overlap: how the ranks' index sets relate.
            codec: the form of the values on the wire.
            comm: every rank calls the same collectives in the same order.
            healthy: whether this rank's gradient was finite; travels along, so that all ranks learn of it.
        """


def gather_counts(selection: Selection, comm: Comm) -> tuple[int, ...]:
    """Return how many indices each rank chose; asks the others only where the selection did not say."""
    if selection.counts is not None:
        return selection.counts
    mine = torch.tensor([selection.indices.numel()], dtype=torch.int32, device=selection.indices.device)
    return tuple(comm.gather_rows(mine).view(-1).tolist())  # host sync: list lengths shape the next message


def mean_of(values: Tensor, codec: Codec, comm: Comm, *, healthy: bool) -> tuple[Tensor, Tensor, bool]:
    """Average ``values`` (k,), one entry per shared index, over the ranks.

    One more number travels with them: how many ranks were unhealthy.

    Returns:
        the mean (k,), equal bit for bit on all ranks; what this rank sent as decoded (k,); whether all were healthy.
    """
    flag = values.new_full((1,), 0.0 if healthy else 1.0)
    flagged = torch.cat([values, flag])
    average = _mean_raw if codec.lossless else _mean_encoded
    mean, sent = average(flagged, codec, comm)
    return mean[:-1], sent[:-1], not bool(mean[-1] > 0)  # host sync: the policy for NaN acts on the host


def _mean_raw(values: Tensor, codec: Codec, comm: Comm) -> tuple[Tensor, Tensor]:
    total = comm.all_reduce_(values.clone())
    return total / comm.world_size, values


def _mean_encoded(values: Tensor, codec: Codec, comm: Comm) -> tuple[Tensor, Tensor]:
    """Average encoded values: scatter them, add in full precision, share the encoded means.

    An all-reduce of encoded values would round at every hop, and nobody could say what was lost. Here each rank owns
    a part, adds it up in rank order, and books the rounding of the mean as not sent, so that it stays in its residual.
    The bytes are those of an all-reduce of the encoded values.
    """
    n = comm.world_size
    sizes = equal_sizes(values.numel(), n)
    first = sum(sizes[: comm.rank])
    wire = codec.encode(values)
    sent = codec.decode(wire, values.dtype).clone()
    if n == 1:
        return sent, sent
    total = codec.decode(comm.scatter_parts(wire, sizes, "values"), values.dtype).sum(0)
    mean = codec.encode(total / n)
    sent[first : first + sizes[comm.rank]] -= total - n * codec.decode(mean, values.dtype)
    return codec.decode(torch.cat(comm.gather_lists(mean, sizes, "values")), values.dtype), sent
