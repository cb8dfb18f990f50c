"""Several reductions of one rank at a time: what they request then travels together."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from micro.comm.requests import AllGather, AllReduce, Once, Reduction, Request, ToHost

T = TypeVar("T")


def together(reductions: Sequence[Reduction[T]]) -> Reduction[list[T]]:
    """Carry on several reductions side by side; what they request at a time travels together.

    Which of them request something is the same on all ranks: it follows from the answers before.
    """
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(reductions)))
    waiting: dict[int, Any] = {}
    while answers:
        for place, answer in answers.items():
            try:
                request = reductions[place].send(answer)
                assert isinstance(request, Request), "each requests one thing at a time"
                waiting[place] = request
            except StopIteration as end:
                results[place] = end.value
        if reading := [place for place, request in waiting.items() if isinstance(request, ToHost)]:
            numbers = [waiting.pop(place).numbers for place in reading]
            read = iter((yield ToHost(numbers=[number for each in numbers for number in each])))
            answers = {place: [next(read) for _ in each] for place, each in zip(reading, numbers, strict=True)}
        else:
            places = sorted(waiting)  # the same on all ranks, whatever each has read
            given = (yield from _joined([waiting.pop(place) for place in places])) if places else []
            answers = dict(zip(places, given, strict=True))
    return [results[place] for place in range(len(reductions))]


def _joined(requests: list[Request]) -> Reduction[list[Any]]:
    """Return the answers to requests of which rows, and sums, of one kind and dtype are one request."""
    groups: dict[Hashable, list[int]] = {}
    for place, request in enumerate(requests):
        can_join = isinstance(request, AllGather | AllReduce)
        key = (type(request), request.kind, request.mine.dtype) if can_join else place  # type: ignore[attr-defined]
        groups.setdefault((key, id(request.comm)), []).append(place)
    sent = [_whole([requests[place] for place in places]) for places in groups.values()]
    answers: list[Any] = [None] * len(requests)
    for places, answer in zip(groups.values(), (yield sent), strict=True):
        parts = [answer] if len(places) == 1 else (yield from _apart(answer, [requests[place] for place in places]))
        for place, part in zip(places, parts, strict=True):
            answers[place] = part
    return answers


def _whole(requests: list[Any]) -> Request:
    first: Request = requests[0]
    if len(requests) == 1:
        return first
    mine = torch.cat([request.mine for request in requests])
    return type(first)(mine=mine, kind=first.kind, comm=first.comm)  # type: ignore[call-arg,attr-defined]


def _apart(answer: Tensor, requests: list[Any]) -> Reduction[list[Tensor]]:
    """Return the parts of a sum, or of rows, which simulated ranks share."""
    sizes = [request.mine.numel() for request in requests]
    if answer.dim() == 1:
        return list(answer.split(sizes))
    split = partial(answer.split, sizes, dim=-1)
    parts: list[Tensor] = yield Once(work=lambda: [part.contiguous() for part in split()], comm=requests[0].comm)
    return parts
