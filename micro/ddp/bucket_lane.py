"""The lane on which DDP's buckets are reduced, one after the other, decided together, and handed back to DDP."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any

import torch

from micro.comm.requests import AllReduce
from micro.ddp.buckets import Bucket
from micro.drivers.lane import Lane
from micro.drivers.reductions import Reductions
from micro.kernels.threads import one_while


class BucketLane:
    """Reduces the buckets of a backward in the order in which they were put on the lane, several of them at a time.

    With each bucket that comes, one round of messages is sent (micro.comm.loop): the first message of this bucket,
    the second of the one before it, and so on; after the last bucket as many rounds follow as it still needs. So
    backward hides the messages of all buckets but the last few, and B buckets of c requests take B + c - 1 rounds, not
    B c.
    Where a step needs the whole gradient first, all buckets are launched at the end. Which of the two a bucket travels
    in must not depend on which buckets happen to wait on the lane: that differs from rank to rank.

    DDP gets no bucket back before the last one of a backward is reduced: then it is known of all of them whether they
    are finite, and the step counts for all or for none. No overlap is lost by that. At its end a backward waits for the
    futures of all buckets anyway, and does nothing with one before.

    The public methods are called by the thread of backward: begin, put for each bucket, finish. All others run on the
    lane's.

    Args:
        steps: the reductions of the present step.
        finds_unused: whether DDP looks for parameters that no rank has used.
    """

    def __init__(self, steps: Reductions, lane: Lane, device: torch.device, *, finds_unused: bool) -> None:
        self._steps, self._lane, self._device = steps, lane, device
        self._unused = self._unused_of if finds_unused else None
        self._weight = 1.0  # of the gradients of this backward
        self._waiting: list[Bucket] = []  # for the whole gradient
        self._is_open = False
        self._is_beside_backward = False  # then the lane's loops leave the threads to it

    @property
    def is_beside(self) -> bool:
        """Whether backward goes on while buckets are reduced."""
        return self._lane.is_beside

    def begin(self, *, has_inputs: bool, counts_inputs: bool) -> None:
        """Begin a backward; see Reductions.begin."""
        self._is_open, self._is_beside_backward = True, self._lane.is_beside

        def begin() -> None:
            self._release()  # nothing is left, unless an error ended the backward before
            self._weight = self._steps.begin(has_inputs=has_inputs, counts_inputs=counts_inputs)

        self._lane.put(partial(self._run, begin))

    def put(self, buckets: Sequence[Bucket]) -> None:
        """Reduce the parts of a bucket in place, after all that were put before; its future is set at the end."""
        uses = [tensor for bucket in buckets for tensor in (bucket.grad, bucket.buffer)]
        self._lane.put(partial(self._run, self._go_on, buckets), uses)

    def finish(self) -> None:
        """End the backward whose last bucket was put, unless this was called before."""
        self._is_beside_backward = False
        if self._is_open:
            self._is_open = False
            self._lane.put(partial(self._run, self._end))

    def wait(self) -> None:
        """Wait for all buckets that were put; on an accelerator the caller's stream waits for the lane's."""
        done, reached = Event(), list[Any]()

        def reach() -> None:
            if self._device.type == "cuda":
                reached.append(torch.cuda.current_stream(self._device).record_event())
            done.set()

        self._lane.put(reach)
        done.wait()
        for event in reached:
            torch.cuda.current_stream(self._device).wait_event(event)

    def close(self) -> None:
        """End the lane."""
        self._lane.close()

    def _run(self, work: Callable[[], None], buckets: Sequence[Bucket] = ()) -> None:
        """Do a part of a backward: a task of the lane must not raise, backward does at its end."""
        self._waiting += buckets
        try:
            if not self._steps.has_failed:
                with one_while(lambda: self._is_beside_backward):
                    work()
        except BaseException as error:
            self._steps.fail(error)
        if self._steps.has_failed:
            self._release()

    def _go_on(self) -> None:
        if not self._steps.needs_whole_gradient:
            self._launch()
        self._steps.advance()

    def _end(self) -> None:
        self._launch()
        self._steps.decide(is_finite=self._steps.end())

    def _launch(self) -> None:
        for bucket in self._waiting:
            bucket.check()
            if self._weight != 1:
                bucket.grad.mul_(self._weight)
        if self._waiting:
            self._steps.launch(self._waiting, self._unused)
            self._waiting = []

    def _unused_of(self, buckets: Sequence[Any]) -> list[str]:
        """Return the parameters of these buckets that no rank used: DDP drops their update."""
        names = [name for bucket in buckets for name in bucket.layout.names]
        gradients = [gradient for bucket in buckets for gradient in bucket.layout.split(bucket.grad).values()]
        used = torch.stack([gradient.any() for gradient in gradients]).to(torch.int32)
        flags = self._steps.comm.answer(AllReduce(mine=used, kind="counts")).tolist()  # host sync: which are unused
        return [name for name, is_used in zip(names, flags, strict=True) if not is_used]

    def _release(self) -> None:
        """Give DDP zeros where nothing can be reduced any more, so that backward ends and raises."""
        left: list[Any] = [*self._steps.abandon(), *self._waiting]
        self._waiting = []
        for bucket in left:
            bucket.grad.zero_()
            bucket.put_back()
