"""The ranks that reduce together, as one of them sees them; what it has sent, and how long that took."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from micro.comm.operations import Kind, Op
from micro.comm.requests import Reduction, Request, carried_out
from micro.comm.spans import Clock


@dataclass(slots=True)
class Traffic:
    """What the collectives of one step cost this rank.

    Attributes:
        num_bytes: bytes sent, by kind, as the bandwidth-optimal form of a collective sends them (bytes_sent).
        elapsed: seconds spent inside collectives.
        calls: each operation in turn, with its size (micro.comm.operations.OPS).
        local_bytes: the part of num_bytes that stayed within a node, where ranks are of two levels.
        local_calls: the operations within a node, with their sizes.
        num_shared: of the operations, those that travelled in a collective of another bucket (micro.comm.rounds).
    """

    num_bytes: dict[Kind, float] = field(default_factory=lambda: {"counts": 0.0, "indices": 0.0, "values": 0.0})
    elapsed: float = 0.0
    calls: list[tuple[Op, float]] = field(default_factory=list)
    local_bytes: float = 0.0
    local_calls: list[tuple[Op, float]] = field(default_factory=list)
    num_shared: int = 0

    @property
    def num_collectives(self) -> int:
        """Number of collectives called, but for those of which another bucket's message was the first."""
        return len(self.calls) + len(self.local_calls) - self.num_shared

    def move(self, num_bytes: float, kind: Kind, to: Kind) -> None:
        """Count as ``to`` a part of what was counted as ``kind``: several kinds may share a message."""
        self.num_bytes[kind] -= num_bytes
        self.num_bytes[to] += num_bytes

    def add_local(self, local: "Traffic") -> None:
        """Add what the collectives within a node cost."""
        for kind, sent in local.num_bytes.items():
            self.num_bytes[kind] += sent
        self.elapsed += local.elapsed
        self.local_bytes += sum(local.num_bytes.values())
        self.local_calls += local.calls


@dataclass(frozen=True, slots=True)
class Levels:
    """A group of ranks as nodes: ``within``, the ranks of this rank's node; ``between``, those of the same place.

    Rank r is the rank ``r % ranks_per_node`` within its node and the rank ``r // ranks_per_node`` between nodes.
    """

    within: "Comm"
    between: "Comm"


@dataclass(frozen=True, slots=True)
class Started:
    """Requests whose messages are under way.

    Attributes:
        answers: waits for the end, and returns the answers in the order of the requests.
        is_completed: whether nothing has to be waited for.
    """

    answers: Callable[[], list[Any]]
    is_completed: Callable[[], bool] = lambda: True


class Comm:
    """The ranks that reduce together: here one rank, which sends nothing. A subclass says who answers its requests.

    Attributes:
        timed: whether times are recorded on an accelerator; the host waits for it at each of them (see `instant`).
        traffic: of the present step.
        clock: of the reduction; it stands still while others run.
        shares_memory: whether what follows from values that all ranks hold alike is computed once for all of them.
    """

    shares_memory = False

    def __init__(self, rank: int = 0, world_size: int = 1, *, timed: bool = False) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timed = timed
        self.traffic = Traffic()
        self.clock = Clock()
        self._levels: dict[int, Levels] = {}

    def for_reduction(self) -> Self:
        """Return these ranks for one of several reductions under way: with a clock of its own, the step's traffic."""
        own = copy.copy(self)
        own.clock = Clock()
        return own

    def levels(self, ranks_per_node: int, device: torch.device) -> Levels:
        """Return this rank's node and its peers in other nodes; all ranks make them together, at the first call.

        Both have no traffic yet, and the clock of this reduction.

        Args:
            device: of what they will send.

        Raises:
            ValueError: the ranks cannot be divided into nodes of this size.
        """
        if self.world_size % ranks_per_node:
            raise ValueError(
                f"ranks_per_node must divide the number of ranks, got {ranks_per_node} for {self.world_size} ranks"
            )
        if ranks_per_node not in self._levels:
            node, place = divmod(self.rank, ranks_per_node)
            within = range(node * ranks_per_node, (node + 1) * ranks_per_node)
            between = range(place, self.world_size, ranks_per_node)
            self._levels[ranks_per_node] = Levels(self._part(within, device), self._part(between, device))
        made = self._levels[ranks_per_node]
        return Levels(self._beside(made.within), self._beside(made.between))

    def _beside(self, part: "Comm") -> "Comm":
        own = copy.copy(part)
        own.clock, own.timed = self.clock, self.timed
        own.begin_step()
        return own

    def _part(self, ranks: range, device: torch.device) -> "Comm":
        return Comm(timed=self.timed) if len(ranks) == 1 else self._subgroup(ranks, device)

    def _subgroup(self, ranks: range, device: torch.device) -> "Comm":
        """Return a group of some ranks of this one, this rank among them; each of them calls this."""
        raise ValueError(f"{type(self).__name__} has no groups of some of its ranks: use a GroupComm")

    def begin_step(self) -> None:
        """Start the counts of a new step."""
        self.traffic = Traffic()

    def now(self, device: torch.device | None = None) -> float:
        """Return a time of the reduction's clock.

        Args:
            device: where the reduction works; by default the one that was given last.
        """
        clock = self.clock
        clock.device = device or clock.device
        return clock.ran + (self.instant() - clock.since)

    def instant(self) -> float:
        """Return the present, NaN on an accelerator unless ``timed``: there the host waits for the current stream.

        It does not wait while a CUDA graph is captured.
        """
        device = self.clock.device
        if device.type == "cuda":
            if not self.timed:
                return math.nan
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(device).synchronize()  # host sync: the user wants the times of phases
        return time.perf_counter()

    def leave(self) -> float:
        """Note where the clock stands, since others may run now, and return the present."""
        at, clock = self.instant(), self.clock
        clock.ran, clock.since = clock.ran + (at - clock.since), at
        return at

    def come_back(self, waited: float, at: float) -> None:
        """Let the clock go on at present, from where it stood and what this rank has ``waited`` for its messages."""
        self.clock.ran, self.clock.since = self.clock.ran + waited, at
        self.traffic.elapsed = self.traffic.elapsed + waited

    def start(self, requests: Sequence[Request]) -> Started:
        """Start what reductions over these ranks request at the same time, of other ranks, and count it."""
        raise NotImplementedError("one rank has all answers by itself")

    def answer(self, request: Request) -> Any:
        """Carry out one request now: for set-up and for what a driver does between two reductions."""
        return carried_out(_one(request), self)


def _one(request: Request) -> Reduction[Any]:
    answer = yield request
    return answer
