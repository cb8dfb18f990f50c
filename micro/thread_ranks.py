"""Threads that stand in for ranks: they send through shared memory, and one that fails or stays away ends them all."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.peer_failures import PeerError, named, words_of_failure

T = TypeVar("T")
TIMEOUT_S = 600.0
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
        self.cores = threading.Semaphore(self.num_cores)
        self.running: set[int] = set()
        self.ended: set[int] = set()
        self.failure: str | None = None
        self.error: BaseException | None = None
        self.moved_at = time.monotonic()

    def start(self, rank: int) -> None:
        """Wait for a core; called by a rank before its work."""
        self.cores.acquire()
        self.running.add(rank)
        self.moved_at = time.monotonic()

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
            self.running.discard(rank)
        self.cores.release()

    def fail(self, why: str, error: BaseException | None = None) -> None:
        """End all ranks, unless they are ended already; called with the lock held."""
        if self.failure is not None:
            return
        self.failure, self.error, self.moved_at = why, error, time.monotonic()
        for barrier in self.barriers:
            barrier.wake_waiting()
        self.cores.release(self._world_size)  # a rank that stays away keeps its core

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
    """Where ``ranks`` wait for each other in a collective. Each waits for a lock of its own, which wakes it faster
    than a condition would.
    """

    def __init__(self, ranks: Sequence[int], crew: _Crew) -> None:
        self.ranks = ranks
        self._crew = crew
        crew.barriers.append(self)
        self.reset()

    def reset(self) -> None:
        """Return to the initial state; no rank may be waiting."""
        self._num_done = 0
        self._calls: dict[int, str] = {}
        self._locks = [threading.Lock() for _ in self.ranks]
        for lock in self._locks:
            lock.acquire()

    @property
    def call(self) -> str | None:
        """The collective that a rank waits in; None where none does."""
        return next(iter(self._calls.values()), None)

    def wait(self, place: int, call: str) -> None:
        """Return when all ranks have come.

        Raises:
            PeerError: one of them cannot come any more, or calls something else.
        """
        crew, rank = self._crew, self.ranks[place]
        with crew.lock:
            self._arrive(place, call)
            if len(self._calls) == len(self.ranks):
                self._num_done += 1
                self._wake(place)
                return
            num_done, cores = self._num_done, crew.cores
            crew.running.discard(rank)
        cores.release()
        self._locks[place].acquire()
        cores.acquire()
        crew.running.add(rank)
        if self._num_done == num_done:
            raise PeerError(crew.failure)

    def _arrive(self, place: int, call: str) -> None:
        crew = self._crew
        if crew.ended and not crew.ended.isdisjoint(self.ranks):
            crew.fail(f"{named(sorted(crew.ended.intersection(self.ranks)))} ended without coming to {call}")
        if self.call not in (None, call):
            other = next(iter(self._calls))
            crew.fail(f"rank {self.ranks[other]} calls {self.call}, rank {self.ranks[place]} {call} at the same time")
        if crew.failure is not None:
            raise PeerError(crew.failure)
        self._calls[place] = call
        crew.moved_at = time.monotonic()

    def wake_waiting(self) -> None:
        """Wake all ranks that wait here; called with the lock held."""
        self._wake(None)

    def _wake(self, own: int | None) -> None:
        for place in self._calls:
            if place != own:
                self._locks[place].release()
        self._calls.clear()


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
        self._parts: dict[range, _SharedMemory] = {}

    def part(self, places: range) -> "_SharedMemory":
        """Return the memory that the ranks of these places share; the first to call makes it."""
        with self.crew.lock:
            if places not in self._parts:
                self._parts[places] = _SharedMemory([self.ranks[place] for place in places], self.crew)
            return self._parts[places]


class ThreadComm(Comm):
    """One thread's end of a simulated group. Sums are added in rank order, so they are the same on all ranks."""

    def __init__(self, rank: int, memory: _SharedMemory) -> None:
        super().__init__(rank, len(memory.ranks))
        self._memory = memory
        self._turn = 0
        self._parts: list[ThreadComm] = []

    def restart(self) -> None:
        """Start over after some ranks left a collective that others had not reached."""
        self._turn = 0
        for part in self._parts:
            part.restart()

    def _subgroup(self, ranks: range, device: torch.device) -> Comm:
        part = ThreadComm(ranks.index(self.rank), self._memory.part(ranks))
        self._parts.append(part)
        return part

    def _put(self, item: Any, call: str) -> list[Any]:
        """Put ``item``, which must not change any more, where all ranks read it; return every rank's item."""
        self._turn ^= 1
        slots = self._memory.slots[self._turn]
        slots[self.rank] = item
        self._memory.barrier.wait(self.rank, call)
        return slots

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        torch.stack(self._put(row.clone(), "gather_rows"), out=rows)

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        everyone = self._put(sent.clone().split(sent_sizes), "exchange")
        torch.cat([parts[self.rank] for parts in everyone], out=received)

    def _all_reduce_(self, x: Tensor) -> None:
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


class _Call:
    """What the ranks return from one call of ``run``; ``done`` is set when the last of them has ended."""

    def __init__(self, world_size: int) -> None:
        self.results: list[Any] = [None] * world_size
        self.done = threading.Event()
        self._num_left = world_size
        self._lock = threading.Lock()

    def take_part(self, work: Callable[[Comm], Any], comm: Comm, crew: _Crew) -> None:
        """Do one rank's work, on its thread."""
        crew.start(comm.rank)
        try:
            self.results[comm.rank] = work(comm)
        except BaseException as error:
            crew.end(comm.rank, error)
        else:
            crew.end(comm.rank)
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self.done.set()


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
            names those. It begins anew whenever a rank comes to one.

    Raises:
        ValueError: world_size is less than 1, or timeout_s is not positive.
    """

    def __init__(self, world_size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        threads = torch.get_num_threads()
        self._crew = _Crew(world_size, threads)
        memory = _SharedMemory(range(world_size), self._crew)
        self.comms = [ThreadComm(rank, memory) for rank in range(world_size)]
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
        for tasks, comm in zip(self._queues, self.comms, strict=True):
            tasks.put(partial(call.take_part, work, comm, crew))
        try:
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
        for comm in self.comms:
            comm.restart()

    def close(self) -> None:
        """End the threads; one that is still at work ends with the process."""
        self._finalizer()
        for rank, thread in enumerate(self._threads):
            if not self._still_at_work or rank in self._crew.ended:
                thread.join()
