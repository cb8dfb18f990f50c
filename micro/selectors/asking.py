"""Choices that ask all ranks something on their way, so that many of them can ask in one message."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm, Kind

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """A collective that a choice waits for: its answer is (world_size, m), every rank's ``mine``, or their sum (m,).

    Attributes:
        op: "gather_rows" or "all_reduce".
        mine: (m,) of this rank; equally long on all ranks. The sum may take its memory.
        kind: as what its bytes count.
        is_read: whether the host needs the answer, which is then in its memory: one read for all that ask together.
    """

    op: Literal["gather_rows", "all_reduce"]
    mine: Tensor
    kind: Kind = "counts"
    is_read: bool = False


Asking = Generator[Ask, Tensor, T]
"""A choice under way: it yields what it asks, is sent the answer, and returns its result."""


def answered(asking: Asking[T], comm: Comm) -> T:
    """Return what a choice comes to, asking by itself."""
    return answered_together([asking], comm)[0]


def answered_together(askings: Sequence[Asking[T]], comm: Comm) -> list[T]:
    """Return what each choice comes to; what they ask at a time, of one kind and dtype, is one message.

    Which of them ask is the same on all ranks: it follows from the answers before.
    """
    results: dict[int, T] = {}
    waiting = dict(_advanced(dict.fromkeys(range(len(askings))), askings, results))
    while waiting:
        answers: dict[int, Tensor | None] = {}
        for places in _alike(waiting):
            given = _answer([waiting[place] for place in places], comm)
            answers.update(zip(places, given, strict=True))
        waiting = dict(_advanced(dict(sorted(answers.items())), askings, results))
    return [results[place] for place in range(len(askings))]


def _advanced(
    answers: dict[int, Tensor | None], askings: Sequence[Asking[T]], results: dict[int, T]
) -> Generator[tuple[int, Ask], None, None]:
    """Give choices their answers; yield what they ask next, or store what they have come to."""
    for place, answer in answers.items():
        try:
            yield place, askings[place].send(answer)  # type: ignore[arg-type]  # None begins it
        except StopIteration as end:
            results[place] = end.value


def _alike(waiting: dict[int, Ask]) -> list[list[int]]:
    """Return the places of those that one message can serve."""
    found: dict[tuple[object, ...], list[int]] = {}
    for place, ask in waiting.items():
        found.setdefault((ask.op, ask.kind, ask.mine.dtype, ask.is_read), []).append(place)
    return list(found.values())


def _answer(asks: Sequence[Ask], comm: Comm) -> list[Tensor]:
    call = comm.gather_rows if asks[0].op == "gather_rows" else comm.all_reduce_
    if len(asks) == 1:
        return [_received(call(asks[0].mine, asks[0].kind), asks[0])]
    answer = _received(call(torch.cat([ask.mine for ask in asks]), asks[0].kind), asks[0])
    sizes = [ask.mine.numel() for ask in asks]
    if answer.dim() == 1:
        return list(answer.split(sizes))
    return comm.alike(lambda: [part.contiguous() for part in answer.split(sizes, dim=-1)])


def _received(answer: Tensor, ask: Ask) -> Tensor:
    return answer.cpu() if ask.is_read else answer  # host sync: what the choices do next depends on it
