"""The class Comm: the ranks of a reduction from the view of one rank, with its bytes sent and times."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch

Op = Literal["all_reduce", "gather_rows", "gather_lists", "scatter", "broadcast"]
OPS: tuple[Op, ...] = get_args(Op)
"""The collective operations, by the names under which they are counted, measured and predicted. The size of one, in
bytes, is that of the vector of an all_reduce or broadcast, of one rank's row or list in a gather, and of all that one
rank sends in a scatter."""

Kind = Literal["counts", "indices", "values"]
"""As what bytes are counted."""
_NO_BYTES: dict[Kind, float] = {"counts": 0.0, "indices": 0.0, "values": 0.0}

PADDING = 1.25  # lists of n ranks travel padded to the longest where that makes no more of them than this


def travels_padded(counts: Sequence[int]) -> bool:
    """Return whether lists of these lengths, one of each rank, are gathered filled up to the longest.

    A rank sends the longest as often as it would send its own, so the rank that has it, for which all wait, sends no
    more than without padding. Two ranks save nothing by it.
    """
    total = sum(counts)
    return len(counts) > 2 and total > 0 and len(counts) * max(counts) <= PADDING * total


def bytes_sent(op: Op, size: float, world_size: int) -> float:
    """Return the bytes that a rank sends in a collective by its bandwidth-optimal form, as a mean over the ranks.

    Args:
        size: of the operation; see OPS.
    """
    if op == "all_reduce":
        return 2 * size * (world_size - 1) / world_size
    if op == "broadcast":
        return size * (world_size - 1) / world_size
    return size if op == "scatter" else (world_size - 1) * size


@dataclass(slots=True)
class Clock:
    """The times of a reduction in seconds; it stands still while others run. Only differences are meaningful.

    Attributes:
        ran: how long it has run up to the time ``since``, from which it goes on.
        waited: how long it has waited for messages, and for the numbers of its accelerator.
        instant: returns the present; NaN where times are not recorded.
    """

    ran: float = 0.0
    waited: float = 0.0
    since: float = 0.0
    instant: Callable[[], float] = time.perf_counter


def instants_of(device: torch.device, *, timed: bool) -> Callable[[], float]:
    """Return what returns the present: on an accelerator NaN, or if ``timed`` when the current stream has come to it.

    It does not wait while a CUDA graph is captured.
    """
    if device.type != "cuda":
        return time.perf_counter
    if not timed:
        return lambda: math.nan

    def instant() -> float:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).synchronize()  # host sync: the user wants the times of phases
        return time.perf_counter()

    return instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the time of a reduction went: choosing, inside collectives (waiting included), and in all else.

    In seconds of the host's clock; NaN where times are not recorded.
    """

    select: float = 0.0
    exchange: float = 0.0
    rest: float = 0.0


@dataclass(slots=True)
class Traffic:
    """What the collectives of one step cost this rank.

    Attributes:
        num_bytes: bytes sent, by kind, as the bandwidth-optimal form of a collective sends them (bytes_sent).
        calls: each operation in turn, with its size (OPS).
        local_bytes: the part of num_bytes that stayed within a node, where ranks are of two levels.
        local_calls: the operations within a node, with their sizes.
        num_shared: of the operations, those that travelled in a collective of another bucket (micro.comm.loop).
    """

    num_bytes: dict[Kind, float] = field(default_factory=_NO_BYTES.copy)
    calls: list[tuple[Op, float]] = field(default_factory=list)
    local_bytes: float = 0.0
    local_calls: list[tuple[Op, float]] = field(default_factory=list)
    num_shared: int = 0

    @property
    def num_collectives(self) -> int:
        """Number of collectives called, but for those of which another bucket's message was the first."""
        return len(self.calls) + len(self.local_calls) - self.num_shared

    def add_local(self, local: "Traffic") -> None:
        """Add what the collectives within a node cost."""
        for kind, sent in local.num_bytes.items():
            self.num_bytes[kind] += sent
        self.local_bytes += sum(local.num_bytes.values())
        self.local_calls += local.calls


@dataclass(frozen=True, slots=True)
class Started:
    """Requests whose messages are under way.

    Attributes:
        answers: waits for the end, and returns the answers in the order of the requests.
        is_completed: returns whether nothing has to be waited for.
    """

    answers: Callable[[], list[Any]]
    is_completed: Callable[[], bool] = lambda: True


class Comm:
    """The ranks that reduce together: here one rank, which sends nothing. A subclass says who answers its requests.

    Attributes:
        timed: whether times are recorded on an accelerator; the host waits for it at each of them (see `instants_of`).
        traffic: of the present step.
        clock: of the reduction.
        shares_memory: whether what follows from values that all ranks hold alike is computed once for all of them.
    """

    shares_memory = False

    def __init__(self, rank: int = 0, world_size: int = 1, *, timed: bool = False) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timed = timed
        self.traffic = Traffic()
        self.clock = Clock()
        self.parts: dict[int, tuple[Comm, Comm]] = {}  # see micro.comm.levels

    def for_reduction(self) -> Self:
        """Return these ranks for one of several reductions under way: with a clock of its own, the step's traffic."""
        own = object.__new__(type(self))
        vars(own).update(vars(self), clock=Clock())
        return own

    def subgroup(self, ranks: range, device: torch.device) -> "Comm":
        """Return a group of some ranks of this one, this rank among them; each of them calls this."""
        raise ValueError(f"{type(self).__name__} has no groups of some of its ranks: use a GroupComm")

    def begin_step(self) -> None:
        """Start the counts of a new step."""
        self.traffic = Traffic()

    def now(self, device: torch.device | None = None) -> float:
        """Return a time of the reduction's clock, which stands still while it waits.

        Args:
            device: where the reduction works; by default the one that was given last.
        """
        clock = self.clock
        if device is not None and device.type != "cpu":
            clock.instant = instants_of(device, timed=self.timed)
        return clock.ran + (clock.instant() - clock.since)

    def start(self, requests: Sequence[Any]) -> Started:
        """Start what reductions over these ranks request at the same time, of other ranks, and count it."""
        raise NotImplementedError("one rank has all answers by itself")

    def answer(self, request: Any) -> Any:
        """Carry out one request now: for set-up and for what a driver does between two reductions."""
        request.comm = self
        return request.alone() if self.world_size == 1 else self.start([request]).answers()[0]
