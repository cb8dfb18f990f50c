"""The lane: runs the reductions of gradients in order, concurrently with backward or in its thread.

On an accelerator a lane has its own stream, synchronised as follows:

- *The lane waits for the gradients.* ``put`` records an event on the caller's stream, after the kernels that wrote the
  task's inputs, and the lane's stream waits for it before the task. Tasks run in order on the lane's stream, so each
  sees the residual of the previous one.
- *The consumer waits for the lane.* A bucket returns to DDP through a future of the bucket's device. It is set on the
  lane's stream, after the last kernel of the step, and PyTorch makes the waiting stream wait for an event recorded
  there. To wait for all tasks without a future, call `BucketLane.wait`.
- *Memory stays valid.* PyTorch's allocator reuses freed memory on the stream that allocated it. The gradients of a task
  belong to the caller's stream, so ``put`` records them on the lane's: they are not reused before the lane has passed
  the point where they were freed. Memory that a task allocates is used only on the lane's stream, except for the
  future's value, which PyTorch records, and residuals, which live as long as their reducer.

`tests/unit/test_lane_streams.py` checks that any two uses of a tensor on two streams are ordered by such events.
"""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Task = Callable[[], None]
LaneChoice = Literal["auto", "thread", "caller"]
"""Which thread reduces: one of the lane's own, that of backward, or what fits the backend and the model."""
CLOSE_S = 5.0


class Lane(ABC):
    """Runs what is put on it one after the other, without gradients of its own.

    One lane means one order: every rank puts its buckets on it in the order of DDP's numbers, so all ranks call the
    same collectives in the same order, whatever becomes ready when. ``is_beside`` says that backward goes on while a
    task runs.
    """

    is_beside: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def put(self, task: Task, uses: Sequence[Tensor] = ()) -> None:
        """Run ``task`` after all that was put before, once the work queued on the caller's stream so far is done.

        A task must not raise: the exception would be lost.

        Args:
            uses: tensors of the caller's stream that the task uses.
        """
        ready = None
        if self._stream is not None:
            for tensor in uses:
                tensor.record_stream(self._stream)
            ready = torch.cuda.current_stream(self._device).record_event()
        self._take(task, ready)

    @abstractmethod
    def _take(self, task: Task, ready: Any) -> None:
        """Run ``task``, on an accelerator behind the event ``ready``."""

    def close(self) -> None:  # noqa: B027 - a lane without a thread has nothing to end
        """End after the tasks that were put."""


class ThreadLane(Lane):
    """Runs tasks in a thread of its own: backward goes on meanwhile.

    No callback waits, neither on autograd's threads nor on the process group's, and on an accelerator the host of
    backward never does.

    Two threads then call collectives: this one, over a process group of its own, and that of backward, where DDP and
    the model have some (the map of used parameters, batch norm over all ranks). Each thread has one order, the same on
    all ranks; between the two there is none. Gloo needs none: groups have connections of their own, so each collective
    goes on when all ranks have called it. NCCL's kernels wait on the device for those of the other ranks: two ranks
    that launch two communicators' kernels in different orders can wait for each other for ever where the device does
    not run both at once. Use CallerLane there. For the same reason models on one accelerator share a lane: see
    `thread_lane`.

    The thread ends with the lane. It is a daemon: a collective that waits for a lost rank keeps no process alive.
    """

    is_beside: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._tasks: queue.SimpleQueue[tuple[Task, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_drain, args=(self._tasks, device, self._stream), name="micro-lane", daemon=True
        )
        self._thread.start()
        self._num_users = 1
        weakref.finalize(self, self._tasks.put, None)

    def _take(self, task: Task, ready: Any) -> None:
        self._tasks.put((task, ready))

    def shared(self) -> "ThreadLane | None":
        """Return this lane for one more user; None once it was closed."""
        self._num_users += bool(self._num_users)
        return self if self._num_users else None

    def close(self) -> None:
        """End the thread after the tasks that were put; one that waits for a lost rank is left after some seconds."""
        self._num_users -= 1
        if self._num_users == 0:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(CLOSE_S)


_lanes: "weakref.WeakValueDictionary[torch.device, ThreadLane]" = weakref.WeakValueDictionary()


def thread_lane(device: torch.device) -> ThreadLane:
    """Return a lane with a thread: of an accelerator the one that all models there share, on a CPU a new one.

    Two models in one backward put their buckets on it in one order, the same on all ranks. Each user closes it once.
    """
    known = _lanes.get(device)
    lane = (known and known.shared()) or ThreadLane(device)
    if device.type == "cuda":
        _lanes[device] = lane
    return lane


class CallerLane(Lane):
    """Runs tasks at once, in the thread that puts them: that of backward, which then calls all collectives itself.

    With the model's own process group there is one communicator, one thread and one order, the order in which
    backward reaches its buckets and its own collectives; it is the same on all ranks where DDP without a hook needs it
    to be. On an accelerator backward's kernels that were launched before go on beside those of the lane's stream. The
    host waits with every read of a value (how much each rank sends), so less communication is hidden.
    """

    @torch.no_grad()
    def _take(self, task: Task, ready: Any) -> None:
        kind = self._device.type
        # a backward inside of autocast would have the reducer's products rounded too
        rounds = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        if self._stream is not None:
            self._stream.wait_event(ready)
        with rounds, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            task()


def _drain(tasks: "queue.SimpleQueue[tuple[Task, Any] | None]", device: torch.device, stream: Any) -> None:
    if stream is not None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream)
    with torch.no_grad():  # a setting of each thread: backward's own has it off already
        while (item := tasks.get()) is not None:
            task, ready = item
            if stream is not None:
                stream.wait_event(ready)
            task()
            del item, task, ready  # what they hold must not live until the next task comes
