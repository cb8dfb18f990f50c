"""The lane on which gradients are reduced: it runs tasks in order, beside backward or in its thread.

On an accelerator a lane has a stream of its own, and what waits for what is this:

- *The lane waits for the gradients.* ``put`` records an event on the caller's stream, behind the kernels that wrote
  what the task reads, and the lane's stream waits for it before the task. Tasks themselves are in the order of that one
  stream: the residual that one leaves is there for the next.
- *The consumer waits for the lane.* A bucket goes back to DDP by a future of the bucket's device. It is set on the
  lane's stream, behind the last kernel of the step, and PyTorch has the stream that waits for it wait for an event
  recorded there. Who needs the end of all tasks without a future calls `Reduction.wait`: its host waits for the tasks,
  its stream for the lane's.
- *Memory is kept.* PyTorch's allocator gives memory that is freed to the next who asks on the stream on which it was
  allocated. The gradients of a task are of the caller's stream, so ``put`` records them on the lane's: they are not
  given away before the lane has passed the place at which they were freed. What a task allocates is of the lane's
  stream and used there alone, but for what the future holds, which PyTorch records, and residuals, which live as long
  as what reduces them.
- *Simulated ranks* (micro.lockstep) share one device and the stream of whoever runs them, so that no event is needed.

`tests/unit/test_lane_streams.py` checks that any two uses of a tensor on two streams have such a path between them.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

Task = Callable[[], None]
LaneChoice = Literal["auto", "thread", "caller"]
"""Which thread reduces: one of the lane's own, that of backward, or what fits the backend and the model."""
CLOSE_S = 5.0


class Lane(Protocol):
    """Runs what is put on it one after the other.

    One lane means one order: every rank puts its buckets on it in the order of DDP's numbers, so all ranks call the
    same collectives in the same order, whatever becomes ready when. ``is_beside`` says that backward goes on while a
    task runs. The streams of an accelerator are explained above.
    """

    is_beside: ClassVar[bool] = False

    def put(self, task: Task, uses: Sequence[Tensor] = ()) -> None:
        """Run ``task`` after all that was put before, once the work queued on the caller's stream so far is done.

        A task must not raise: the exception would be lost.

        Args:
            uses: tensors of the caller's stream that the task uses.
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
        self._device = device
        self._stream = _stream_of_its_own(device)
        self._tasks: queue.SimpleQueue[tuple[Task, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_drain, args=(self._tasks, device, self._stream), name="micro-lane", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)

    def put(self, task: Task, uses: Sequence[Tensor] = ()) -> None:
        """Hand ``task`` to the thread; see Lane."""
        self._tasks.put((task, _handed_over(uses, self._device, self._stream)))

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
        self._stream = _stream_of_its_own(device)

    def put(self, task: Task, uses: Sequence[Tensor] = ()) -> None:
        """Run ``task``; see Lane."""
        with torch.no_grad():
            if self._stream is None:
                task()
                return
            self._stream.wait_event(_handed_over(uses, self._device, self._stream))
            with torch.cuda.stream(self._stream):
                task()

    def close(self) -> None:
        """Do nothing: no task is left."""


def _stream_of_its_own(device: torch.device) -> "torch.cuda.Stream | None":
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def _handed_over(uses: Sequence[Tensor], device: torch.device, stream: "torch.cuda.Stream | None") -> Any:
    """Keep the memory of ``uses`` for ``stream``; return an event behind all work of the caller's stream so far."""
    if stream is None:
        return None
    for tensor in uses:
        tensor.record_stream(stream)
    return torch.cuda.current_stream(device).record_event()


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
