"""The lane on which gradients are reduced while backward goes on: one thread that runs tasks in order."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

Task = Callable[[], None]
CLOSE_S = 5.0


class Lane:
    """Runs what is put on it one after the other, in a thread of its own.

    One lane means one order: every rank puts its buckets on it in the order of DDP's numbers, so all ranks call the
    same collectives in the same order, whatever becomes ready when. No callback waits, neither on autograd's threads
    nor on the process group's. On an accelerator the lane has a stream of its own, which waits for the gradients
    that are put on it; the host never does.

    The thread ends with the lane. It is a daemon: a collective that waits for a lost rank keeps no process alive.
    """

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
        """Run ``task`` after all that was put before, once the work queued on the caller's stream so far is done.

        A task must not raise: the exception would be lost.
        """
        ready = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        self._tasks.put((task, ready))

    def close(self) -> None:
        """End the thread after the tasks that were put; one that waits for a lost rank is left after some seconds."""
        self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)


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
