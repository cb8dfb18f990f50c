"""What a schedule is: which gradients travel together, decided from measured times before training."""

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

Seconds = Callable[[float], float]  # of a number of bytes of gradient
Messages = Callable[[float], tuple[tuple[float, float], ...]]  # of a number of bytes: latency and transfer of each
Ends = tuple[int, ...]  # where each group ends (exclusive), rising; the last is the number of layers


def no_time(_num_bytes: float) -> float:
    """Take no time."""
    return 0.0


@dataclass(frozen=True)
class Problem:
    """What a schedule decides on: gradients that become ready one after the other, and what it costs to send them.

    All are sent over one lane, in order.

    Attributes:
        exchange: seconds of the collectives for a group of so many bytes of gradient. Dense: its all-reduce; sparse:
            all that the method sends for it, or what the group adds to a step where groups share rounds.
        select: seconds of computation for a group before it can be sent. It delays backward: worker and
            selection share the processor.
        messages: of a group, its collectives in turn, each as the seconds of its latency and of its transfer, where
            groups share rounds (micro.comm.loop); None: a group's exchange is one message.
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
    """One group on its way; seconds from the start of backward.

    Attributes:
        select_s: when its selection was done; when its last gradient was complete, where there is none.
        sent_s: when its exchange began.
        done_s: when its exchange ended.
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
        backward_s: when computation of backward, selections included, was over.
        end_s: when all was reduced, from the start of backward.
        step_s: of the whole step, forward and update included.
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
    """Return when each group is selected, sent and done: the recurrence that all schedules minimise.

    Backward computes and selects on one clock; messages follow each other on another. A group that is ready begins a
    round, which sends the next message of every group before it too: their latencies are one, their transfers share
    the link. When all groups are ready, rounds follow each other.
    """
    delay = lane = 0.0
    began: list[tuple[float, float]] = []  # of each group: when it was selected, and sent
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
    """Send the next message of each group at ``sent_s``; return when it has arrived."""
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
    """A way to cut the layers of a model into groups: a frozen dataclass of its settings.

    ``is_planned`` is False where the cut follows from sizes alone, so that DDP makes the buckets by itself, whatever
    was measured.
    """

    kind: ClassVar[str] = "schedule"
    home: ClassVar[str] = "experiments.planning.schedules"
    group: ClassVar[str] = "micro.schedules"
    is_planned: ClassVar[bool] = True

    @abstractmethod
    def cut(self, problem: Problem) -> Ends:
        """Return where each group ends, layers counted in backward order; the last end is the number of layers."""

    def bucket_cap_mb(self, model_mb: float) -> float | None:
        """Return the cap by which DDP makes this cut of a model of so many MiB, None for its default.

        It is used where nothing is planned.
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
    """Which parameters share a bucket, in the order in which backward completes them.

    Attributes:
        schedule: that made it.
        groups: names of parameters.
        num_bytes: of each group.
        step_s: predicted seconds of a step, where there was something to predict from.

    Raises:
        ValueError: no groups, an empty one, a name that repeats, or sizes that do not fit them.
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
        """A hash of what the plan decides: two ranks with the same one send the same buckets."""
        content = json.dumps([self.schedule, self.groups, self.num_bytes])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def bucket_caps_mb(self) -> tuple[float, ...]:
        """The caps, in MiB, by which DDP makes these buckets."""
        return tuple(size / 2**20 for size in self.num_bytes)

    def check_model(self, num_bytes: Mapping[str, int]) -> None:
        """Raise ValueError unless the plan is for a model with these parameters and bytes of gradients."""
        mine = {name for group in self.groups for name in group}
        odd = [f"it has no '{name}'" for name in mine if name not in num_bytes]
        odd += [f"the plan lacks its '{name}'" for name in num_bytes if name not in mine]
        for group, planned in zip(self.groups, self.num_bytes, strict=True) if not odd else ():
            real = sum(num_bytes[name] for name in group)
            if real != planned:
                odd.append(f"the group of '{group[0]}' has {planned} bytes there and {real} here")
        if odd:
            raise ValueError(f"the plan is for another model: {odd[0]}; profile this model and plan again")
