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

from micro.kernels.threads import one_while

Task = Callable[[], None]
LaneChoice = Literal["auto", "thread", "caller"]
"""Which thread reduces: the lane's own, that of backward, or ``auto``: chosen by backend and model."""
CLOSE_S = 5.0


class Lane(ABC):
    """Runs tasks one after the other, without autograd.

    Every rank puts its buckets on the lane in the order of DDP's numbers, so all ranks call the same collectives in the
    same order, no matter when gradients become ready. ``is_beside`` says that backward continues while a task runs.

    Attributes:
        backward_runs: is set while it does. Then compiled loops of a lane with a thread use no other thread.
    """

    is_beside: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.backward_runs = threading.Event()
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def put(self, task: Task, uses: Sequence[Tensor] = ()) -> None:
        """Run ``task`` after all earlier tasks, and after the work queued on the caller's stream so far.

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
        """Run ``task``, on an accelerator after the event ``ready``."""

    def close(self) -> None:  # noqa: B027 - a lane without a thread has nothing to end
        """End after the remaining tasks."""


class ThreadLane(Lane):
    """Runs tasks in its own thread, while backward continues.

    Nothing waits in autograd's threads or in the process group's, and on an accelerator backward's host never waits.

    Two threads may then call collectives: this one, over its own process group, and that of backward, for DDP and the
    model (the map of used parameters, SyncBatchNorm). Each thread has the same order on all ranks, but the order
    between the two may differ. Gloo allows that, because groups have separate connections. NCCL's kernels wait on the
    device for those of other ranks: ranks that launch the kernels of two communicators in different orders can wait for
    each other forever, if the device does not run both at once. Use CallerLane there. For the same reason models on one
    accelerator share a lane: see `thread_lane`.

    The thread ends with the lane. It is a daemon, so a collective that waits for a lost rank keeps no process alive.
    """

    is_beside: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._tasks: queue.SimpleQueue[tuple[Task, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_drain, args=(self._tasks, device, self._stream, self.backward_runs), name="micro-lane", daemon=True
        )
        self._thread.start()
        self._num_users = 1
        weakref.finalize(self, self._tasks.put, None)

    def _take(self, task: Task, ready: Any) -> None:
        self._tasks.put((task, ready))

    def shared(self) -> "ThreadLane | None":
        """Return this lane for one more user; None if it is closed."""
        self._num_users += bool(self._num_users)
        return self if self._num_users else None

    def close(self) -> None:
        """End the thread after the remaining tasks; do not wait long for one that waits for a lost rank."""
        self._num_users -= 1
        if self._num_users == 0:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(CLOSE_S)


_lanes: "weakref.WeakValueDictionary[torch.device, ThreadLane]" = weakref.WeakValueDictionary()


def thread_lane(device: torch.device) -> ThreadLane:
    """Return a lane with a thread: on a CPU a new one, on an accelerator one that all its models share.

    Two models in one backward then put their buckets on it in the same order on all ranks. Each user closes it once.
    """
    known = _lanes.get(device)
    lane = (known and known.shared()) or ThreadLane(device)
    if device.type == "cuda":
        _lanes[device] = lane
    return lane


class CallerLane(Lane):
    """Runs tasks at once, in the thread of backward, which then calls all collectives itself.

    With the model's process group there is one communicator, one thread and one order: that in which backward reaches
    its buckets and its own collectives. DDP without a hook needs the same order on all ranks too. On an accelerator,
    backward's earlier kernels run concurrently with the lane's. The host waits at every read of a value (how much each
    rank sends), so less communication is hidden.
    """

    @torch.no_grad()
    def _take(self, task: Task, ready: Any) -> None:
        kind = self._device.type
        # if backward runs under autocast, the reducer's products would be rounded too
        rounds = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        if self._stream is not None:
            self._stream.wait_event(ready)
        with rounds, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            task()


def _drain(
    tasks: "queue.SimpleQueue[tuple[Task, Any] | None]", device: torch.device, stream: Any, busy: threading.Event
) -> None:
    if stream is not None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream)
    with one_while(busy.is_set), torch.no_grad():  # each thread has its own settings
        while (item := tasks.get()) is not None:
            task, ready = item
            if stream is not None:
                stream.wait_event(ready)
            task()
            del item, task, ready  # otherwise their tensors would live until the next task
