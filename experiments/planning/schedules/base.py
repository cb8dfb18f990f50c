"""The base class of schedules, which decide from measured times which gradients are sent together."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from experiments.planning.documents import Document
from experiments.planning.traces import Trace
from micro.parts import Part

Seconds = Callable[[float], float]  # from bytes of gradient
Messages = Callable[[float], tuple[tuple[float, float], ...]]  # bytes -> (latency, transfer) of each message
Ends = tuple[int, ...]  # the ascending, exclusive ends of groups; the last is the number of layers


def no_time(_num_bytes: float) -> float:
    """Take no time."""
    return 0.0


@dataclass(frozen=True)
class Problem:
    """The input of a schedule: when gradients become ready, and the costs of sending them, in order, over one lane.

    Attributes:
        exchange: seconds of the collectives for a group with so many bytes of gradient: the all-reduce if dense, all
            messages of a sparse method, or what the group adds to a step if groups share rounds.
        select: seconds of computation for a group before it can be sent. It delays backward, which uses the same
            processor.
        messages: the collectives of a group in order, each as seconds of latency and of transfer, if groups share
            rounds (micro.comm.loop); None: a group's exchange is one message.
    """

    trace: Trace
    exchange: Seconds
    select: Seconds = no_time
    messages: Messages | None = None

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """prefix[j]: bytes of the first j layers."""
        sums = [0]
        for layer in self.trace.layers:
            sums.append(sums[-1] + layer.num_bytes)
        return tuple(sums)

    @cached_property
    def ready_s(self) -> tuple[float, ...]:
        """When each gradient is complete, in seconds from the start of backward."""
        return tuple(layer.ready_s for layer in self.trace.layers)

    def num_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the layers from ``start`` up to ``stop``."""
        return self.prefix[stop] - self.prefix[start]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The exchange of one group; seconds from the start of backward.

    Attributes:
        select_s: end of its selection, or without selection, of its last gradient.
        sent_s: start of its exchange.
        done_s: end of its exchange.
    """

    start: int
    stop: int
    select_s: float
    sent_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step under a plan.

    Attributes:
        backward_s: end of backward, including selections.
        end_s: end of all exchanges, from the start of backward.
        step_s: duration of the whole step, including forward and update.
    """

    transfers: tuple[Transfer, ...]
    backward_s: float
    end_s: float
    step_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that backward did not hide."""
        return self.end_s - self.backward_s


def timeline(problem: Problem, ends: Sequence[int]) -> Timeline:
    """Return when each group is selected, sent and done; schedules minimise its end.

    Backward computes and selects on one clock; messages run in sequence on another. Each ready group begins a round,
    which also sends the next message of every earlier group: they share one latency, and their transfers share the
    link. When all groups are ready, rounds follow each other.
    """
    delay = lane = 0.0
    began: list[tuple[float, float]] = []  # times of selection and sending of each group
    done: list[float] = []
    left: list[list[tuple[float, float]]] = []
    for start, stop in groups_of(ends):
        size = problem.num_bytes(start, stop)
        delay += problem.select(size)
        selected = problem.ready_s[stop - 1] + delay
        began.append((selected, max(lane, selected)))
        left.append(list(problem.messages(size)) if problem.messages else [(0.0, problem.exchange(size))])
        done.append(began[-1][1])
        lane = _send_round(began[-1][1], left, done)
    while any(left):
        lane = _send_round(lane, left, done)
    transfers = [Transfer(*group, *at, end) for group, at, end in zip(groups_of(ends), began, done, strict=True)]
    backward = problem.trace.backward_s + delay
    end = max(lane, backward)
    return Timeline(tuple(transfers), backward, end, problem.trace.forward_s + end + problem.trace.update_s)


def _send_round(sent_s: float, left: list[list[tuple[float, float]]], done: list[float]) -> float:
    """Send the next message of each group at ``sent_s``; return when all have arrived."""
    places = [place for place, messages in enumerate(left) if messages]
    costs = [left[place].pop(0) for place in places]
    done_s = sent_s + max((latency for latency, _ in costs), default=0.0) + sum(transfer for _, transfer in costs)
    for place in places:
        done[place] = done_s
    return done_s


def groups_of(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the (start, stop) of each group."""
    return pairwise((0, *ends))


class Schedule(Part, ABC):
    """Cuts the layers of a model into groups: a frozen dataclass of settings.

    ``is_planned`` is False if the cut depends only on sizes, so that DDP's own buckets are used without a plan.
    """

    kind: ClassVar[str] = "schedule"
    home: ClassVar[str] = "experiments.planning.schedules"
    group: ClassVar[str] = "micro.schedules"
    is_planned: ClassVar[bool] = True

    @abstractmethod
    def cut(self, problem: Problem) -> Ends:
        """Return the end of each group, with layers in backward order; the last end is the number of layers."""

    def bucket_cap_mb(self, model_mb: float) -> float | None:
        """Return DDP's bucket_cap_mb for this cut of a model of so many MiB, None for its default.

        Used without a plan.
        """
        return None

    def plan(self, problem: Problem) -> "Plan":
        """Return the plan for a model."""
        ends = self.cut(problem)
        names = [layer.name for layer in problem.trace.layers]
        groups = tuple(tuple(names[start:stop]) for start, stop in groups_of(ends))
        sizes = tuple(problem.num_bytes(*group) for group in groups_of(ends))
        return Plan(schedule=self.name, groups=groups, num_bytes=sizes, step_s=timeline(problem, ends).step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """The parameters of each bucket, in the order of backward.

    Attributes:
        schedule: the schedule that made it.
        groups: names of parameters.
        num_bytes: of each group.
        step_s: predicted seconds of a step, if there was a basis.

    Raises:
        ValueError: no groups, an empty one, a repeated name, or sizes that do not match.
    """

    format: ClassVar[str] = "micro-plan-1"
    schedule: str
    groups: tuple[tuple[str, ...], ...]
    num_bytes: tuple[int, ...]
    step_s: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        names = [name for group in self.groups for name in group]
        if not names or not all(self.groups) or len(set(names)) < len(names):
            raise ValueError("groups of a plan must hold each parameter once, and none may be empty")
        if len(self.num_bytes) != len(self.groups) or min(self.num_bytes) < 1:
            raise ValueError(f"num_bytes of a plan must be positive, one per group, got {self.num_bytes}")

    @property
    def digest(self) -> str:
        """A hash of the buckets: ranks with equal hashes send equal buckets."""
        content = json.dumps([self.schedule, self.groups, self.num_bytes])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def bucket_caps_mb(self) -> tuple[float, ...]:
        """DDP's caps, in MiB, for these buckets."""
        return tuple(size / 2**20 for size in self.num_bytes)

    def check_model(self, num_bytes: Mapping[str, int]) -> None:
        """Raise ValueError unless the plan fits a model with these parameters and bytes of gradients."""
        mine = {name for group in self.groups for name in group}
        odd = [f"it has no '{name}'" for name in mine if name not in num_bytes]
        odd += [f"the plan lacks its '{name}'" for name in num_bytes if name not in mine]
        for group, planned in zip(self.groups, self.num_bytes, strict=True) if not odd else ():
            real = sum(num_bytes[name] for name in group)
            if real != planned:
                odd.append(f"the group of '{group[0]}' has {planned} bytes there and {real} here")
        if odd:
            raise ValueError(f"the plan is for another model: {odd[0]}; profile this model and plan again")
