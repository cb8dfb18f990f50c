"""A selector, an exchange and a codec of another package: they use what micro makes public, and nothing else."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.extend import (
    AllGather,
    AllGatherLists,
    Calls,
    Choice,
    Choosing,
    Codec,
    Comm,
    Exchange,
    Exchanged,
    Key,
    Needs,
    NoState,
    Overlap,
    Reduction,
    Selection,
    Selector,
    SparseValues,
    Step,
    Transport,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest(Selector[NoState]):
    """Select the smallest magnitudes.

    Args:
        skip: how many of the very smallest to leave out.
    """

    skip: int = 0
    name: ClassVar[str] = "smallest"
    overlap: ClassVar[Overlap] = Overlap.ANY
    sends: ClassVar[Choosing] = Choosing()

    def __post_init__(self) -> None:
        if self.skip < 0:
            raise ValueError(f"skip of smallest must be at least 0, got {self.skip}")

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return this rank's k smallest magnitudes."""
        yield from ()
        order = acc.abs().argsort(stable=True)[self.skip : self.skip + step.target_count]
        return Selection(torch.sort(order).values.to(torch.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Exchange[NoState]):
    """Send every rank's indices and values to all, as they are encoded."""

    name: ClassVar[str] = "pairs"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})
    needs: ClassVar[Needs] = Needs.INT32_INDICES

    def exchange(self, state: NoState, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Return the sum of what all sent, as a part for each rank, each a share of the mean."""
        n, codec, mine = transport.comm.world_size, transport.wire.values, selection.indices
        known = torch.tensor([mine.numel(), int(bool(transport.step.is_finite))], dtype=torch.int32, device=mine.device)
        rows = (yield AllGather(mine=known)).tolist()
        counts = [count for count, _ in rows]
        indices = yield AllGatherLists(mine=mine, counts=counts, kind="indices")
        encoded = codec.encode(acc[mine], transport.key)
        sizes = [codec.num_bytes(count, acc.dtype) for count in counts]
        wires = (yield AllGatherLists(mine=encoded, counts=sizes, kind="values")).split(sizes)
        values = [codec.decode(wire, count, acc.dtype) for wire, count in zip(wires, counts, strict=True)]
        parts = [SparseValues(own, value / n) for own, value in zip(indices.split(counts), values, strict=True)]
        return Exchanged(
            update=tuple(parts),
            sent=SparseValues(mine, values[transport.comm.rank]),
            counts=tuple(counts),
            num_updated=int(indices.unique().numel()),
            is_finite=all(flag for _, flag in rows),
        )

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return a row of two numbers, and lists of indices and of values."""
        lists = choice.indices(choice.sent, choice.numel), choice.values(choice.sent)
        return (("gather_rows", 8), *(("gather_lists", size) for size in lists)), choice.distinct


@dataclass(frozen=True, slots=True, kw_only=True)
class Upper(Codec):
    """Send the upper half of each value's single-precision bits: rounded towards zero, in two bytes."""

    name: ClassVar[str] = "upper"

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return two bytes a value."""
        return 2 * count

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the upper halves."""
        return (
            values.to(torch.float32)
            .view(torch.int16)[1::2]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)
        )

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the values, whose lower halves are zero."""
        halves = torch.zeros(count, 2, dtype=torch.int16, device=wire.device)
        halves[:, 1] = wire.clone().view(torch.int16)
        return halves.view(-1).view(torch.float32).to(dtype)
