"""Threads that stand in for ranks: they send through shared memory, and one that fails or stays away ends them all."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from micro.comm import Comm
from micro.peer_failures import PeerError, named, words_of_failure

T = TypeVar("T")
TIMEOUT_S = 600.0
SHORT = 2**16  # elements of a sum that one rank makes for all; parts of longer ones are added side by side
GRACE_S = 5.0  # for ranks that were given up to end
Task = Callable[[], None]


class _Crew:
    """What the threads of a group know of each other, also those of a group of some of its ranks.

    No more of them run at a time than the group has cores, so that fewer compete for the interpreter's lock.

    Attributes:
        num_cores: how many run at a time.
        lock: held while anything here, or in a barrier, is changed.
        running: ranks that have a core; the others wait, for a core or in a collective, or have ended.
        ended: ranks whose work is over.
        failure: why all ranks end; None while none has failed.
        error: of the rank that failed first; None where no rank raised one.
        moved_at: when a rank last began, came to a collective or ended.
    """

    def __init__(self, world_size: int, num_cores: int) -> None:
        self._world_size, self.num_cores = world_size, num_cores
        self.lock = threading.Lock()
        self.barriers: list[_Barrier] = []
        self.begin()

    def begin(self) -> None:
        """Return to the initial state; no rank may be at work."""
        self._num_free = self.num_cores
        self._ready = deque[int]()
        self._starts: dict[int, Task] = {}
        self._gates = [threading.Lock() for _ in range(self._world_size)]
        for gate in self._gates:
            gate.acquire()
        self.running: set[int] = set()
        self.ended: set[int] = set()
        self.failure: str | None = None
        self.error: BaseException | None = None
        self.moved_at = time.monotonic()

    def start(self, calls: Sequence[Task]) -> None:
        """Call each rank's own of ``calls``, which lets it begin, when there is a core for it."""
        with self.lock:
            self._starts = dict(enumerate(calls))
            self.make_ready(range(len(calls)))

    def wait(self, rank: int) -> None:
        """Return when this rank is given a core; called by the rank."""
        self._gates[rank].acquire()

    def make_ready(self, ranks: Iterable[int]) -> None:
        """Give each of these ranks a core, now or when one is free; called with the lock held."""
        self._ready.extend(ranks)
        while self._ready and self._num_free:
            self._num_free -= 1
            self._give_core()

    def leave_core(self, rank: int) -> None:
        """Pass this rank's core on, to the one that waits longest; called with the lock held."""
        self.running.discard(rank)
        if self._ready:
            self._give_core()
        else:
            self._num_free += 1

    def _give_core(self) -> None:
        rank = self._ready.popleft()
        self.running.add(rank)
        start = self._starts.pop(rank, None)
        if start is None:
            self._gates[rank].release()
        else:
            self.moved_at = time.monotonic()
            start()

    def end(self, rank: int, error: BaseException | None = None) -> None:
        """Note that a rank's work is over, and end those that wait for it in vain; called by the rank."""
        with self.lock:
            self.ended.add(rank)
            self.moved_at = time.monotonic()
            if error is not None:
                self.fail(words_of_failure(rank, error), error)
            for barrier in self.barriers:
                if rank in barrier.ranks and barrier.call is not None:
                    self.fail(f"rank {rank} ended without coming to {barrier.call}")
            self.leave_core(rank)

    def fail(self, why: str, error: BaseException | None = None) -> None:
        """End all ranks, unless they are ended already; called with the lock held."""
        if self.failure is not None:
            return
        self.failure, self.error, self.moved_at = why, error, time.monotonic()
        self._num_free += self._world_size  # a rank that stays away keeps its core
        self.make_ready([rank for barrier in self.barriers for rank in barrier.leave()])

    def seconds_left(self, timeout_s: float) -> float:
        """Return how long nothing may move from now on; ranks that all are at work may take any time."""
        if self.failure is None and len(self.running | self.ended) == self._world_size:
            return timeout_s
        return self.moved_at + timeout_s - time.monotonic()

    def give_up(self, timeout_s: float) -> None:
        """End all ranks because nothing has moved for so long; name those that the others wait for."""
        with self.lock:
            missing = sorted(self.running)
            call = next((barrier.call for barrier in self.barriers if barrier.call is not None), "an end")
            self.fail(f"{named(missing)} did not come to {call} within {timeout_s:g} s")


class _Barrier:
    """Where ``ranks`` wait for each other in a collective. The last to come makes the others ready, each of which wakes
    when it is given a core: a thread that woke before would only wait again.

    Attributes:
        call: the collective that a rank waits in; None where none does.
    """

    def __init__(self, ranks: Sequence[int], crew: _Crew) -> None:
        self.ranks = ranks
        self._crew = crew
        crew.barriers.append(self)
        self.reset()

    def reset(self) -> None:
        """Return to the initial state; no rank may be waiting."""
        self._num_done = 0
        self._places: list[int] = []
        self.call: str | None = None

    def wait(self, place: int, call: str) -> None:
        """Return when all ranks have come.

        Raises:
            PeerError: one of them cannot come any more, or calls something else.
        """
        crew, rank = self._crew, self.ranks[place]
        with crew.lock:
            self._arrive(place, call)
            if len(self._places) == len(self.ranks):
                self._num_done += 1
                self._places.pop()
                crew.make_ready(self.leave())
                return
            num_done = self._num_done
            crew.leave_core(rank)
        crew.wait(rank)
        if self._num_done == num_done:
            raise PeerError(crew.failure)

    def _arrive(self, place: int, call: str) -> None:
        crew = self._crew
        if crew.ended and not crew.ended.isdisjoint(self.ranks):
            crew.fail(f"{named(sorted(crew.ended.intersection(self.ranks)))} ended without coming to {call}")
        if self.call not in (None, call):
            first, rank = self.ranks[self._places[0]], self.ranks[place]
            crew.fail(f"rank {first} calls {self.call}, rank {rank} {call} at the same time")
        if crew.failure is not None:
            raise PeerError(crew.failure)
        self.call = call
        self._places.append(place)
        crew.moved_at = time.monotonic()

    def leave(self) -> list[int]:
        """Return the ranks that wait here, which do so no more; called with the lock held.

        The last to come is the first: what it works on is still in the caches.
        """
        waiting = [self.ranks[place] for place in reversed(self._places)]
        self._places.clear()
        self.call = None
        return waiting


class _Answers:
    """What one of ``world_size`` ranks computes for all of them: a call's answer lives until each rank has had it."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._calls: dict[int, _Answer] = {}

    def of(self, number: int, work: Callable[[], T]) -> T:
        """Return what ``work`` gives in the call of this number: the first rank to come makes it.

        Where that raises, each rank works for itself, and fails alike.
        """
        answer = self._calls.get(number) or self._calls.setdefault(number, _Answer())
        with answer.lock:  # held by the rank that works, which has a core and waits for nobody
            answer.num_come += 1
            if answer.num_come == self._world_size:
                del self._calls[number]
            if not answer.is_made:
                answer.value, answer.is_made = work(), True
            return cast(T, answer.value)

    def forget(self) -> None:
        """Drop all answers; no rank may be at work."""
        self._calls.clear()


class _Answer:
    """What ``work`` gave, once ``is_made``, and how many ranks have come for it."""

    __slots__ = ("is_made", "lock", "num_come", "value")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_come, self.is_made = 0, False
        self.value: Any = None


class _SharedMemory:
    """The shared memory through which ``ranks`` send.

    There are two sets of slots, used in turn: a rank that starts a collective has finished the previous one, so no rank
    still reads the slots of the one before that.
    """

    def __init__(self, ranks: Sequence[int], crew: _Crew) -> None:
        self.ranks, self.crew = ranks, crew
        self.barrier = _Barrier(ranks, crew)
        self.slots: tuple[list[Any], list[Any]] = ([None] * len(ranks), [None] * len(ranks))
        self.sums: list[Any] = [None] * len(ranks)
        self.answers = _Answers(len(ranks))
        self._parts: dict[range, _SharedMemory] = {}

    def restart(self) -> None:
        """Forget what some ranks have begun together; no rank may be at work."""
        self.answers.forget()
        for part in self._parts.values():
            part.restart()

    def part(self, places: range) -> "_SharedMemory":
        """Return the memory that the ranks of these places share; the first to call makes it."""
        with self.crew.lock:
            if places not in self._parts:
                self._parts[places] = _SharedMemory([self.ranks[place] for place in places], self.crew)
            return self._parts[places]


class ThreadComm(Comm):
    """One thread's end of a simulated group. Sums are added in rank order, so they are the same on all ranks.

    What is gathered, and what is computed from it `alike`, is in memory once for all ranks, unless ``shares`` is False.
    """

    def __init__(self, rank: int, memory: _SharedMemory, *, shares: bool = True) -> None:
        super().__init__(rank, len(memory.ranks))
        self._memory = memory
        self._shares = shares and self.world_size > 1
        self._turn = self._num_answers = 0
        self._parts: list[ThreadComm] = []

    def restart(self) -> None:
        """Start over after some ranks left a collective that others had not reached."""
        self._turn = self._num_answers = 0
        for part in self._parts:
            part.restart()

    def _subgroup(self, ranks: range, device: torch.device) -> Comm:
        part = ThreadComm(ranks.index(self.rank), self._memory.part(ranks), shares=self._shares)
        self._parts.append(part)
        return part

    def _put(self, item: Any, call: str) -> list[Any]:
        """Put ``item``, which must not change any more, where all ranks read it; return every rank's item."""
        self._turn ^= 1
        slots = self._memory.slots[self._turn]
        slots[self.rank] = item
        self._memory.barrier.wait(self.rank, call)
        return slots

    def alike(self, work: Callable[[], T]) -> T:
        """Return what one of the ranks makes by ``work`` for all; see Comm."""
        if not self._shares:
            return work()
        self._num_answers += 1
        return self._memory.answers.of(self._num_answers, work)

    def fill_alike_(self, out: Tensor, work: Callable[[], T]) -> T:
        """Write into ``out`` what one of the ranks makes by ``work`` for all; see Comm."""
        if not self._shares:
            return work()
        worker, answer, filled = self.alike(lambda: (self.rank, work(), out.clone()))
        if worker != self.rank:
            out.copy_(filled)
        return answer

    def _gathered_rows(self, row: Tensor) -> Tensor:
        if not self._shares:
            return super()._gathered_rows(row)
        everyone = self._put(row.clone(), "gather_rows")
        return self.alike(lambda: torch.stack(everyone))

    def _gathered_lists(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        if not self._shares:
            return super()._gathered_lists(mine, counts)
        everyone = self._put(mine.clone(), "gather_lists")
        return self.alike(lambda: torch.cat(everyone))

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        torch.stack(self._put(row.clone(), "gather_rows"), out=rows)

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        targets = [rank for rank, size in enumerate(sent_sizes) if size]
        message = sent.clone()
        leaving = message.split(sent_sizes) if len(targets) > 1 else dict.fromkeys(targets, message)
        everyone = self._put(leaving, "exchange")
        coming = [everyone[source][self.rank] for source, size in enumerate(received_sizes) if size]
        if coming:
            torch.cat(coming, out=received)

    def _all_reduce_(self, x: Tensor) -> None:
        if self._shares and (x.numel() <= SHORT or self._memory.crew.num_cores == 1):
            everyone = self._put(x, "all_reduce")  # not copied: x changes when the sum is there
            x.copy_(self.alike(lambda: _sum_of(everyone)))
            return
        num_parts = min(self.world_size, self._memory.crew.num_cores)  # as many ranks add at a time as run at a time
        everyone = self._put(x.tensor_split(num_parts), "all_reduce")  # not copied: x changes when all have read
        if self.rank < num_parts:
            mine = everyone[0][self.rank].clone()
            for parts in everyone[1:]:
                mine += parts[self.rank]
            self._memory.sums[self.rank] = mine
        self._memory.barrier.wait(self.rank, "all_reduce")
        torch.cat(self._memory.sums[:num_parts], out=x)

    def _broadcast_(self, x: Tensor, source: int) -> None:
        everyone = self._put(x.clone() if self.rank == source else None, "broadcast")
        if self.rank != source:
            x.copy_(everyone[source])


def _sum_of(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of vectors of one length, added in their order."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


class _Call:
    """What the ranks return from one call of ``run``; ``done`` is set when the last of them has ended."""

    def __init__(self, world_size: int) -> None:
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self.results: list[Any] = [None] * world_size
        self.done = threading.Event()
        self._num_left = world_size
        self._lock = threading.Lock()

    def take_part(self, work: Callable[[Comm], Any], comm: Comm, crew: _Crew) -> None:
        """Do one rank's work, on its thread and the caller's stream."""
        try:
            with self._on_stream():
                self.results[comm.rank] = work(comm)
        except BaseException as error:
            crew.end(comm.rank, error)
        else:
            crew.end(comm.rank)
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self.done.set()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _serve(tasks: "SimpleQueue[Task | None]") -> None:
    """Do tasks until there is None; torch's operations get one thread here: the ranks are the parallelism."""
    torch.get_num_threads()  # sets this thread's number, which would otherwise happen later and undo the next line
    torch.set_num_threads(1)
    while (task := tasks.get()) is not None:
        task()
        del task  # what it holds must not live until the next task comes


def _end(queues: Sequence["SimpleQueue[Task | None]"]) -> None:
    for tasks in queues:
        tasks.put(None)


class SimulatedGroup:
    """``world_size`` threads that call collectives together.

    As many of them run at a time as torch's operations have threads where the group is made.

    Args:
        timeout_s: how long the others wait for ranks that do not come to a collective; then all end, and the error
            names those. Counted from zero again whenever a rank comes to one.
        shares: False: every rank computes for itself what is alike on all, as ranks of their own processes do.

    Raises:
        ValueError: world_size is less than 1, or timeout_s is not positive.
    """

    def __init__(self, world_size: int, *, timeout_s: float = TIMEOUT_S, shares: bool = True) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        threads = torch.get_num_threads()
        self._crew = _Crew(world_size, threads)
        self._memory = _SharedMemory(range(world_size), self._crew)
        self.comms = [ThreadComm(rank, self._memory, shares=shares) for rank in range(world_size)]
        self._still_at_work = ""
        self._queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in range(world_size)]
        self._threads = [
            threading.Thread(target=_serve, args=(tasks,), name=f"rank_{rank}", daemon=True)
            for rank, tasks in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _end, self._queues)
        self.run(lambda _: None)  # so that every thread has set its number of threads
        torch.set_num_threads(threads)  # new threads take the last number set: restore it

    def run(self, work: Callable[[Comm], T]) -> list[T]:
        """Call ``work`` on every rank at once and return the results in rank order.

        Raises:
            The error of the rank that failed first; in the others, collectives raise a PeerError that names it.
            PeerError: a rank ended, or stayed away, while others waited for it in a collective.
            RuntimeError: a rank that stayed away before is still at work.
        """
        if self._still_at_work:
            raise RuntimeError(f"{self._still_at_work} still at work since a run that was given up: make a new group")
        call, crew = _Call(len(self.comms)), self._crew
        crew.begin()
        parts = [partial(call.take_part, work, comm, crew) for comm in self.comms]
        try:
            crew.start([partial(tasks.put, part) for tasks, part in zip(self._queues, parts, strict=True)])
            self._wait_for(call)
        except BaseException:  # KeyboardInterrupt
            with crew.lock:
                crew.fail("run was interrupted")
            call.done.wait(GRACE_S)
            raise
        finally:
            if crew.failure is not None:
                self._start_over(call)
        if crew.failure is not None:
            error, crew.error = crew.error or PeerError(crew.failure), None  # its frames refer to the group
            raise error
        return call.results

    def _wait_for(self, call: _Call) -> None:
        """Return when all ranks have ended, or do not end though they were given up."""
        limit = self._timeout_s
        while not call.done.wait(max(self._crew.seconds_left(limit), 0)):
            if self._crew.seconds_left(limit) > 0:
                continue
            if self._crew.failure is not None:
                return
            self._crew.give_up(limit)
            limit = min(limit, GRACE_S)

    def _start_over(self, call: _Call) -> None:
        """Forget the collectives that a failure ended, unless a rank is still at work."""
        if not call.done.is_set():
            left = sorted(set(range(len(self.comms))) - self._crew.ended)
            self._still_at_work = f"{named(left)} {'are' if len(left) > 1 else 'is'}"
            return
        for barrier in self._crew.barriers:
            barrier.reset()
        self._memory.restart()
        for comm in self.comms:
            comm.restart()

    def close(self) -> None:
        """End the threads; one that is still at work ends with the process."""
        self._finalizer()
        for rank, thread in enumerate(self._threads):
            if not self._still_at_work or rank in self._crew.ended:
                thread.join()
