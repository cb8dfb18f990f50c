"""n ranks in one process: threads stand in for workers, and everything else is the same code."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.nonfinite import NonFiniteGradient
from micro.reducers.base import BucketState, Reducer
from micro.stats import StepStats

T = TypeVar("T")


class _Barrier:
    """A barrier for all ranks that also lets no more threads run at a time than there are cores.

    Each rank waits for a lock of its own, which wakes threads faster than a condition. With no more running threads
    than cores, fewer compete for the interpreter's lock.
    """

    def __init__(self, world_size: int, cores: threading.Semaphore | None = None) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self.cores = cores or threading.Semaphore(os.cpu_count() or 1)
        self.reset()

    def reset(self) -> None:
        """Return to the initial state; no rank may be waiting."""
        self._arrived = 0
        self.is_broken = False
        self._locks = [threading.Lock() for _ in range(self._world_size)]
        for lock in self._locks:
            lock.acquire()

    def wait(self, rank: int) -> None:
        """Return when all ranks have arrived; raise BrokenBarrierError if one has failed."""
        with self._lock:
            if self.is_broken:
                raise threading.BrokenBarrierError
            self._arrived = (self._arrived + 1) % self._world_size
            if self._arrived == 0:
                self._wake_others(rank)  # before ``abort`` may: a rank that wakes first may fail at once
                return
        self.cores.release()
        self._locks[rank].acquire()
        self.cores.acquire()
        if self.is_broken:
            raise threading.BrokenBarrierError

    def _wake_others(self, rank: int) -> None:
        for other, lock in enumerate(self._locks):
            if other != rank:
                lock.release()

    def abort(self) -> None:
        """Raise BrokenBarrierError in every rank that waits or will wait."""
        with self._lock:
            self.is_broken = True
            for lock in self._locks:
                if lock.locked():
                    lock.release()


class _SharedMemory:
    """The shared memory through which the threads of one simulated group send.

    There are two sets of slots, used in turn: a rank that starts a collective has finished the previous one, so no rank
    still reads the slots of the one before that.
    """

    def __init__(self, world_size: int, cores: threading.Semaphore | None = None) -> None:
        self.barrier = _Barrier(world_size, cores)
        self.slots: tuple[list[Any], list[Any]] = ([None] * world_size, [None] * world_size)
        self.sums: list[Any] = [None] * world_size
        self._lock = threading.Lock()
        self._parts: dict[range, _SharedMemory] = {}

    def part(self, ranks: range) -> "_SharedMemory":
        """Return the memory that these ranks of the group share; the first to call makes it."""
        with self._lock:
            if ranks not in self._parts:
                self._parts[ranks] = _SharedMemory(len(ranks), self.barrier.cores)
                if self.barrier.is_broken:
                    self._parts[ranks].barrier.abort()
            return self._parts[ranks]

    def abort(self) -> None:
        """Raise BrokenBarrierError in every rank that waits or will wait, in this group or a part of it."""
        self.barrier.abort()
        with self._lock:
            for part in self._parts.values():
                part.barrier.abort()

    def reset(self) -> None:
        """Return to the initial state; no rank may be waiting."""
        self.barrier.reset()
        for part in self._parts.values():
            part.barrier.reset()


class ThreadComm(Comm):
    """One thread's end of a simulated group. Sums are added in rank order, so they are the same on all ranks."""

    def __init__(self, rank: int, world_size: int, memory: _SharedMemory) -> None:
        super().__init__(rank, world_size)
        self._memory = memory
        self._turn = 0
        self._parts: list[ThreadComm] = []

    def restart(self) -> None:
        """Start over after some ranks left a collective that others had not reached."""
        self._turn = 0
        for part in self._parts:
            part.restart()

    def _subgroup(self, ranks: range, device: torch.device) -> Comm:
        part = ThreadComm(ranks.index(self.rank), len(ranks), self._memory.part(ranks))
        self._parts.append(part)
        return part

    def _put(self, item: Any) -> list[Any]:
        """Put ``item``, which must not change any more, where all ranks read it; return every rank's item."""
        self._turn ^= 1
        slots = self._memory.slots[self._turn]
        slots[self.rank] = item
        self._memory.barrier.wait(self.rank)
        return slots

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        torch.stack(self._put(row.clone()), out=rows)

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        everyone = self._put(sent.clone().split(sent_sizes))
        torch.cat([parts[self.rank] for parts in everyone], out=received)

    def _all_reduce_(self, x: Tensor) -> None:
        everyone = self._put(x.tensor_split(self.world_size))  # not copied: x changes when all have read it
        mine = everyone[0][self.rank].clone()
        for parts in everyone[1:]:
            mine += parts[self.rank]
        self._memory.sums[self.rank] = mine
        self._memory.barrier.wait(self.rank)
        torch.cat(self._memory.sums, out=x)

    def _broadcast_(self, x: Tensor, source: int) -> None:
        everyone = self._put(x.clone() if self.rank == source else None)
        if self.rank != source:
            x.copy_(everyone[source])


def _use_one_thread() -> None:
    """Give this thread's torch operations one thread: the ranks are the parallelism."""
    torch.get_num_threads()  # sets this thread's number, which would otherwise happen later and undo the next line
    torch.set_num_threads(1)


class SimulatedGroup:
    """``world_size`` threads that call collectives together.

    Raises:
        ValueError: world_size is less than 1.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self._memory = _SharedMemory(world_size)
        self.comms = [ThreadComm(rank, world_size, self._memory) for rank in range(world_size)]
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(world_size, thread_name_prefix="rank", initializer=_use_one_thread)
        self.run(lambda comm: self._memory.barrier.wait(comm.rank))  # so that every rank's thread starts now
        torch.set_num_threads(threads)  # new threads take the last number set: restore it

    def run(self, work: Callable[[Comm], T]) -> list[T]:
        """Call ``work`` on every rank at once and return the results in rank order.

        Raises:
            The error of the first rank that failed by itself; ranks that waited for it end too.
        """
        futures = [self._pool.submit(self._guarded, work, comm) for comm in self.comms]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            self._memory.reset()
            for comm in self.comms:
                comm.restart()
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]

    def _guarded(self, work: Callable[[Comm], T], comm: Comm) -> T:
        self._memory.barrier.cores.acquire()
        try:
            return work(comm)
        except BaseException:
            self._memory.abort()
            raise
        finally:
            self._memory.barrier.cores.release()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What one simulated step gave.

    Attributes:
        update: (numel,) mean update, the same on all ranks.
        stats: one per rank, in rank order.
        residuals: (world_size, numel) copies, where requested.
    """

    update: Tensor
    stats: list[StepStats]
    residuals: Tensor | None


class Simulation:
    """A reducer on ``world_size`` simulated ranks, for offline studies on any gradients.

    It runs the same code as real processes. Memory: world_size residuals of numel elements, and a copy of the
    gradients during a step.

    Args:
        reducer: what to study.
        layout: names and shapes of the gradient; Layout.flat(numel) where there are none.
        world_size: number of ranks, at least 1.
        dtype, device: of the gradients.
    """

    def __init__(
        self,
        reducer: Reducer,
        layout: Layout,
        world_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.reducer, self.layout, self.world_size = reducer, layout, world_size
        self.dtype, self.device = dtype, torch.device(device)
        self._group = SimulatedGroup(world_size)
        try:
            self._group.run(lambda comm: reducer.prepare(comm, self.device))
        except ValueError:
            self._group.close()
            raise
        self._states = [reducer.start(layout, dtype, self.device) for _ in range(world_size)]

    def step(self, gradients: Tensor, *, residuals: bool = False) -> SimulatedStep:
        """Reduce one step's ``gradients`` (world_size, numel), which are left as they are.

        Raises:
            ValueError: the shape or the dtype is not the simulation's.
        """
        rows = gradients.detach().clone()
        stats = self.step_(rows)
        kept = torch.stack(self.residuals()) if residuals else None
        return SimulatedStep(rows[0], stats, kept)

    def step_(self, gradients: Tensor, *, ahead: Callable[[Comm], object] = lambda _: None) -> list[StepStats]:
        """Reduce one step in place: every row of ``gradients`` (world_size, numel) becomes the mean update.

        Args:
            ahead: called on each rank's thread before its gradient is reduced; what it sends counts as of the step.
        """
        expected = (self.world_size, self.layout.numel)
        if tuple(gradients.shape) != expected or gradients.dtype != self.dtype:
            given = f"{tuple(gradients.shape)} of {gradients.dtype}"
            raise ValueError(f"gradients must be {expected} of {self.dtype}, got {given}")

        def reduce(comm: Comm) -> StepStats | NonFiniteGradient:
            comm.begin_step()
            ahead(comm)
            try:
                return self.reducer.reduce_(self._states[comm.rank], gradients[comm.rank], comm)
            except NonFiniteGradient as error:  # raised on all ranks: each ends its step before the first is passed on
                return error

        stats = []
        for answer in self._group.run(reduce):
            if isinstance(answer, NonFiniteGradient):
                raise answer
            stats.append(answer)
        return stats

    def residuals(self) -> list[Tensor]:
        """Return each rank's residual (numel,), not copied; empty where the reducer keeps none."""
        return self.memory("residual")

    def memory(self, name: str) -> list[Tensor]:
        """Return what each rank's feedback keeps under ``name`` (numel,), not copied; see micro.feedback."""
        return [state.vector(name) for state in self._states]

    def rebuild(self, layout: Layout) -> None:
        """Go on with the same parameters in another order, as DDP does after its first step."""
        self.layout = layout
        self._states = [self.reducer.rebuild(layout, [state], self.dtype, self.device) for state in self._states]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {"ranks": [self.reducer.save(state) for state in self._states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned.

        Raises:
            ValueError: it is of another world size.
        """
        if len(saved["ranks"]) != self.world_size:
            raise ValueError(f"state is of world_size {len(saved['ranks'])}, this simulation has {self.world_size}")
        self._states = [self.reducer.load(rank, self.dtype, self.device) for rank in saved["ranks"]]
        self.layout = self._states[0].layout

    def load_buckets(self, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Go on from each rank's saved buckets, however many they were; the layout stays this simulation's.

        Raises:
            ValueError: they are of another world size or method.
        """
        if len(ranks) != self.world_size:
            raise ValueError(f"state is of world_size {len(ranks)}, this simulation has {self.world_size}")
        loaded = [[self.reducer.load(bucket, self.dtype, self.device) for bucket in buckets] for buckets in ranks]
        self._states = [self._one(buckets) for buckets in loaded]

    def _one(self, buckets: list[BucketState]) -> BucketState:
        if len(buckets) == 1 and buckets[0].layout == self.layout:
            return buckets[0]
        return self.reducer.rebuild(self.layout, buckets, self.dtype, self.device)

    def close(self) -> None:
        """End the simulation's threads."""
        self._group.close()
