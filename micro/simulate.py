"""n ranks in one process: threads stand in for workers, and everything else is the same code."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.reducers.base import Reducer
from micro.stats import StepStats

T = TypeVar("T")


class _Meeting:
    """Where the threads of one simulated group put what they send."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.slots: list[Any] = [None] * world_size
        self.sums: list[Any] = [None] * world_size


class ThreadComm(Comm):
    """One thread's end of a simulated group. Sums are added in rank order, so they are the same on all ranks."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        super().__init__(rank, world_size)
        self._meeting = meeting

    def _put(self, item: Any) -> list[Any]:
        self._meeting.slots[self.rank] = item
        self._meeting.barrier.wait()
        return self._meeting.slots

    def _leave(self) -> None:
        self._meeting.barrier.wait()  # nobody may overwrite a slot that another still reads

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        torch.stack(self._put(row), out=rows)
        self._leave()

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        everyone = self._put(sent.split(sent_sizes))
        torch.cat([parts[self.rank] for parts in everyone], out=received)
        self._leave()

    def _all_reduce_(self, x: Tensor) -> None:
        everyone = self._put(x.tensor_split(self.world_size))
        mine = everyone[0][self.rank].clone()
        for parts in everyone[1:]:
            mine += parts[self.rank]
        self._meeting.sums[self.rank] = mine
        self._meeting.barrier.wait()
        torch.cat(self._meeting.sums, out=x)
        self._leave()

    def _broadcast_(self, x: Tensor, source: int) -> None:
        everyone = self._put(x)
        if self.rank != source:
            x.copy_(everyone[source])
        self._leave()


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
        self._meeting = _Meeting(world_size)
        self.comms = [ThreadComm(rank, world_size, self._meeting) for rank in range(world_size)]
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(world_size, thread_name_prefix="rank", initializer=_use_one_thread)
        self.run(lambda _: self._meeting.barrier.wait())  # all at once, so that every rank's thread starts now
        torch.set_num_threads(threads)  # new threads take the last number set: put it back for everybody else

    def run(self, work: Callable[[Comm], T]) -> list[T]:
        """Call ``work`` on every rank at once and return the results in rank order.

        Raises:
            The error of the first rank that failed by itself; ranks that waited for it are let go.
        """
        futures = [self._pool.submit(self._guarded, work, comm) for comm in self.comms]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            self._meeting.barrier.reset()
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]

    def _guarded(self, work: Callable[[Comm], T], comm: Comm) -> T:
        try:
            return work(comm)
        except BaseException:
            self._meeting.barrier.abort()
            raise

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What one simulated step gave.

    Attributes:
        update: (numel,) mean update, the same on all ranks.
        stats: one per rank, in rank order.
        residuals: (world_size, numel) copies, where asked for.
    """

    update: Tensor
    stats: list[StepStats]
    residuals: Tensor | None


class Simulation:
    """A reducer on ``world_size`` simulated ranks, for offline studies on gradients of any origin.

    It runs the very code that real processes run. Memory: world_size residuals of numel elements, and a copy of the
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

    def step_(self, gradients: Tensor) -> list[StepStats]:
        """Reduce one step in place: every row of ``gradients`` (world_size, numel) becomes the mean update."""
        expected = (self.world_size, self.layout.numel)
        if tuple(gradients.shape) != expected or gradients.dtype != self.dtype:
            given = f"{tuple(gradients.shape)} of {gradients.dtype}"
            raise ValueError(f"gradients must be {expected} of {self.dtype}, got {given}")

        def reduce(comm: Comm) -> StepStats:
            comm.begin_step()
            return self.reducer.reduce_(self._states[comm.rank], gradients[comm.rank], comm)

        return self._group.run(reduce)

    def residuals(self) -> list[Tensor]:
        """Return each rank's residual (numel,), not copied; empty where the reducer keeps none."""
        return self.memory("residual")

    def memory(self, name: str) -> list[Tensor]:
        """Return what each rank's feedback keeps under ``name`` (numel,), not copied; see micro.feedback."""
        return [state.memory[name] for state in self._states]

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

    def close(self) -> None:
        """End the simulation's threads."""
        self._group.close()
