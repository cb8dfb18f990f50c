"""The lane on which DDP's buckets are reduced, one after the other, decided together, and handed back to DDP."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import Event
from typing import Any

import torch

from micro.ddp.buckets import Bucket
from micro.drivers.lane import Lane
from micro.drivers.reductions import Reductions
from micro.kernels.threads import one_while
from micro.reducers.base import BucketState
from micro.requests import AllReduce


class BucketLane:
    """Reduces buckets in the order in which they were put on the lane, several of them at a time.

    With each bucket that comes, one round of messages is sent (micro.rounds): the first message of this bucket, the
    second of the one before it, and so on; after the last bucket as many rounds follow as it still needs. So backward
    hides the messages of all buckets but the last few, and B buckets of c requests take B + c - 1 rounds, not B c.
    To wait for the last bucket would take c rounds in all, but none of them beside backward: it is what happens where a
    step needs the whole gradient first, where all buckets are launched, then all finished. Which of the two a bucket
    travels in must not depend on which buckets happen to wait on the lane: that differs from rank to rank.

    DDP gets no bucket back before the last one of a backward is reduced: then it is known of all of them whether they
    are finite, and the step counts for all or for none. No overlap is lost by that. At its end a backward waits for the
    futures of all buckets anyway, and does nothing with one before.

    The public methods are called by the thread of backward; all others run on the lane's.

    Args:
        steps: the reductions of the present step.
        finds_unused: whether DDP looks for parameters that no rank has used.
    """

    def __init__(self, steps: Reductions, lane: Lane, device: torch.device, *, finds_unused: bool) -> None:
        self._steps, self._lane, self._device = steps, lane, device
        self._unused = self._unused_of if finds_unused else None
        self._weight = 1.0  # of the gradients of this backward
        self._waiting: list[Bucket] = []  # for the whole gradient
        self._is_beside_backward = False  # then the lane's loops leave the threads to it
        self._ends_with_backward = not lane.is_beside and device.type == "cpu"
        self._ends_some = not (self._ends_with_backward and steps.reducer.is_one_sum)
        self._must_end = False

    def put(self, buckets: Sequence[Bucket], *, begins: tuple[bool, bool] | None, ends: bool, at_once: bool) -> None:
        """Reduce the parts of a bucket in place, after all that were put before; its future is set when this is done.

        A lane in the thread of backward waits for the ends of collectives in ``finish`` alone, after all gradients are
        computed: that wait is then counted as communication which backward did not hide.

        Args:
            begins: for the first of a backward, whether this rank has inputs, and whether the mean is over the ranks
                that have some.
            ends: whether it is the last of a backward.
            at_once: whether DDP waits for the buckets as soon as its hook returns, as in the first backward of a static
                graph, where it calls the hook after all gradients are computed.
        """
        self._is_beside_backward = self._lane.is_beside and not ends
        self._must_end = ends and self._ends_with_backward and not at_once
        task = partial(self._run, buckets, begins, ends and not self._must_end)
        self._lane.put(task, uses=[tensor for bucket in buckets for tensor in (bucket.grad, bucket.buffer)])

    def finish(self) -> None:
        """Finish what a lane in the thread of backward left for the end; called when all gradients are computed."""
        if self._must_end:
            self._must_end = False
            self._lane.put(partial(self._run, (), None, True))

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

    def _run(self, buckets: Sequence[Bucket], begins: tuple[bool, bool] | None, ends: bool) -> None:
        """Do a part of a backward: a task of the lane must not raise, backward does at its end."""
        if begins is not None:
            self._release()  # nothing is left, unless an error ended the backward before
        self._waiting += buckets
        try:
            if not self._steps.has_failed:
                with one_while(lambda: self._is_beside_backward):
                    self._reduce(begins, ends)
        except BaseException as error:
            self._steps.fail(error)
        if self._steps.has_failed:
            self._release()

    def _reduce(self, begins: tuple[bool, bool] | None, ends: bool) -> None:
        if begins is not None:
            has_inputs, counts_inputs = begins
            self._weight = self._steps.begin(has_inputs=has_inputs, counts_inputs=counts_inputs)
        if ends or not self._steps.needs_whole_gradient:
            self._launch()
        self._steps.advance(ends_some=self._ends_some)
        if ends:
            is_finite = self._steps.end()
            self._steps.decide(is_finite=is_finite)

    def _launch(self) -> None:
        for bucket in self._waiting:
            bucket.check()
            if self._weight != 1:
                bucket.grad.mul_(self._weight)
        if self._waiting:
            self._steps.launch(self._waiting, self._unused)
        self._waiting = []

    def _unused_of(self, buckets: Sequence[Any]) -> Callable[[BucketState], Collection[str]]:
        """Return what finds the parameters of these buckets that no rank used; all ranks call it together."""

        def unused(state: BucketState) -> list[str]:
            if not state.pieces():
                return []
            gradients = [gradient for bucket in buckets for gradient in bucket.layout.split(bucket.grad).values()]
            used = torch.stack([gradient.any() for gradient in gradients]).to(torch.int32)
            flags = self._steps.comm.answer(AllReduce(mine=used, kind="counts")).tolist()  # host sync: which are unused
            return [name for name, is_used in zip(state.layout.names, flags, strict=True) if not is_used]

        return unused

    def _release(self) -> None:
        """Give DDP zeros where nothing can be reduced any more, so that backward ends and raises."""
        left: list[Any] = [*self._steps.abandon(), *self._waiting]
        self._waiting = []
        for bucket in left:
            bucket.grad.zero_()
            bucket.put_back()
