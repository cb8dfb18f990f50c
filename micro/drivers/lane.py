"""The lane on which gradients are reduced: it runs tasks in order, beside backward or in its thread."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

import torch

Task = Callable[[], None]
LaneChoice = Literal["auto", "thread", "caller"]
"""Which thread reduces: one of the lane's own, that of backward, or what fits the backend and the model."""
CLOSE_S = 5.0


class Lane(Protocol):
    """Runs what is put on it one after the other.

    One lane means one order: every rank puts its buckets on it in the order of DDP's numbers, so all ranks call the
    same collectives in the same order, whatever becomes ready when. On an accelerator a lane has a stream of its own,
    which waits for the gradients that are put on it. ``is_beside`` says that backward goes on while a task runs.
    """

    is_beside: ClassVar[bool] = False

    def put(self, task: Task) -> None:
        """Run ``task`` after all that was put before, once the work queued on the caller's stream so far is done.

        A task must not raise: the exception would be lost.
        """

    def close(self) -> None:
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
    not run both at once. Use CallerLane there.

    The thread ends with the lane. It is a daemon: a collective that waits for a lost rank keeps no process alive.
    """

    is_beside: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self._tasks: queue.SimpleQueue[tuple[Task, Any] | None] = queue.SimpleQueue()
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._thread = threading.Thread(
            target=_drain, args=(self._tasks, device, stream), name="micro-lane", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)
        self._device = device

    def put(self, task: Task) -> None:
        """Hand ``task`` to the thread; see Lane."""
        ready = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        self._tasks.put((task, ready))

    def close(self) -> None:
        """End the thread after the tasks that were put; one that waits for a lost rank is left after some seconds."""
        self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)


class CallerLane(Lane):
    """Runs tasks at once, in the thread that puts them: that of backward, which then calls all collectives itself.

    With the model's own process group there is one communicator, one thread and one order, the order in which
    backward reaches its buckets and its own collectives; it is the same on all ranks where DDP without a hook needs it
    to be. On an accelerator backward's kernels that were launched before go on beside those of the lane's stream. The
    host waits with every read of a value (how much each rank sends), so less communication is hidden.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def put(self, task: Task) -> None:
        """Run ``task``; see Lane."""
        with torch.no_grad():
            if self._stream is None:
                task()
                return
            self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
            with torch.cuda.stream(self._stream):
                task()

    def close(self) -> None:
        """Do nothing: no task is left."""


def _drain(
    tasks: "queue.SimpleQueue[tuple[Task, Any] | None]", device: torch.device, stream: "torch.cuda.Stream | None"
) -> None:
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
