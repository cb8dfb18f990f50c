"""What happens to DDP's buckets on the lane: reduced one after the other, decided together, and handed back to DDP."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from micro.clipping import ClipNorm, clip_to_
from micro.ddp.bucket import Bucket
from micro.ddp.unused_parameters import unused_parameters
from micro.drivers.bucket_states import BucketStates
from micro.drivers.lane import Lane
from micro.drivers.loss_scale import LossScale
from micro.drivers.reductions import Reductions
from micro.group_comm import GroupComm
from micro.kernels.threads import one_while
from micro.nonfinite import Finding, NonFiniteGradient, report
from micro.reducers.base import Reducer
from micro.requests import carried_out


class Reduction:
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

    The public methods are called by the thread of backward; all others run on the lane's. What a call of DDP's hook
    brings is handed over at its end, in one piece: two threads that share the interpreter's lock hinder each other.

    Args:
        reducer, states, comm: what reduces, what it remembers, over which ranks.
        device: of the gradients.
        lane: where it runs.
        loss_scale: the factor on the gradients.
        whole_model: select over all buckets at once.
        clip: see micro.attach; may be changed between steps.
        clip_norm: see micro.attach.
    """

    def __init__(
        self,
        reducer: Reducer,
        states: BucketStates,
        comm: GroupComm,
        device: torch.device,
        *,
        lane: Lane,
        loss_scale: LossScale,
        whole_model: bool,
        clip: float | None,
        clip_norm: ClipNorm | str = "rank",
    ) -> None:
        self.clip = clip
        self._clip_norm = clip_norm
        self.steps = Reductions(reducer, states, comm, device, loss_scale=loss_scale, whole_model=whole_model)
        self._reducer = reducer
        self._states = states
        self._comm = comm
        self._device = device
        self._lane = lane
        self._loss_scale = loss_scale
        self._weight = 1.0  # of the gradients of this backward
        self._waiting: list[Bucket] = []
        self._errors: list[BaseException] = []
        self._has_failed = False
        self._backward_runs = False  # beside the lane, whose loops then leave the threads to it
        self._parts: list[Callable[[], None]] = []  # of a backward, to be handed over
        self._uses: list[Tensor] = []  # the memory that they use
        self._ends_with_backward = not lane.is_beside and device.type == "cpu"
        self._must_finish = False

    def begin(self, *, has_inputs: bool, counts_inputs: bool) -> None:
        """Begin a backward; called before its first bucket is put.

        Args:
            has_inputs: whether this rank has inputs.
            counts_inputs: whether the mean is over the ranks that have some; the same on all ranks.
        """
        self._backward_runs = self._lane.is_beside
        self._must_finish = False
        self._parts = [partial(self._begin, has_inputs, counts_inputs)]

    def put(self, bucket: Bucket) -> None:
        """Reduce ``bucket`` in place, after all that were put before; its future is set when this is done."""
        self._uses += [bucket.grad, bucket.buffer]
        self._parts += [partial(self._receive, bucket), partial(self._advance, is_last=False)]

    def end(self, *, waits_at_once: bool) -> None:
        """End a backward; called after its last bucket was put.

        A lane in the thread of backward waits for the ends of collectives in ``finish`` alone, after all gradients are
        computed: that wait is then counted as communication which backward did not hide.

        Args:
            waits_at_once: whether DDP waits for the buckets as soon as its hook returns, as in the first backward of a
                static graph, where it calls the hook after all gradients are computed.
        """
        self._backward_runs = False
        if self._ends_with_backward and not waits_at_once:
            self._must_finish = True
        else:
            self._parts.append(self._end)

    def hand_over(self) -> None:
        """Hand what was begun, put and ended since the last time to the lane."""
        parts, uses = self._parts, self._uses
        self._parts, self._uses = [], []
        if parts:
            self._lane.put(partial(self._run, parts), uses=uses)

    def finish(self) -> None:
        """Finish what a lane in the thread of backward left for the end; called when all gradients are computed."""
        if self._must_finish:
            self._must_finish = False
            self._lane.put(partial(self._run, [self._end]))

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

    def take_error(self) -> BaseException | None:
        """Return the first error of this backward; one after which nothing can be reduced is returned ever after."""
        error = self._errors[0] if self._errors else None
        self.forget_errors()
        return error

    def forget_errors(self) -> None:
        """Drop the errors of a backward that is over; one after which nothing can be reduced stays."""
        if not self._has_failed:
            self._errors.clear()

    def _run(self, parts: Sequence[Callable[[], None]]) -> None:
        for part in parts:
            self._guarded(part)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do a part of a backward: a task of the lane must not raise, backward does at its end."""
        try:
            with one_while(lambda: self._backward_runs):
                work()
        except BaseException as error:
            self._errors.append(error)
            self._has_failed = True
            self._states.break_off(error)
            self._comm.abort(error)
        if self._has_failed:
            self._release_all()

    def _begin(self, has_inputs: bool, counts_inputs: bool) -> None:
        self._release_all()  # nothing is left, unless an error ended the backward before
        self.steps.forget_step()
        if not self._has_failed:
            self._weight = self.steps.begin(has_inputs=has_inputs, counts_inputs=counts_inputs)

    def _receive(self, bucket: Bucket) -> None:
        self._waiting.append(bucket)
        if self._has_failed:
            return
        bucket.check()
        if self._weight != 1:
            bucket.grad.mul_(self._weight)

    def _end(self) -> None:
        self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> None:
        """Launch what can be launched; finish all but the last that was launched, at the end of a backward all."""
        if self._has_failed:
            return
        if is_last or not self._needs_whole_gradient:
            self._clip()
            parts = [list(self._waiting)] if self.steps.whole_model else [[bucket] for bucket in self._waiting]
            for part in parts if self._waiting else ():
                gradients = [view for bucket in part for view in bucket.gradients]
                self.steps.launch(part, partial(unused_parameters, gradients=gradients, comm=self._comm))
            self._waiting.clear()
        self._comm.rounds.advance()
        if is_last:
            self.steps.finish_all()
            self._decide()
            return
        waits_for_the_end = self._ends_with_backward and self._reducer.is_one_sum
        while self.steps.can_finish and not waits_for_the_end:
            self.steps.finish_first()

    def _clip(self) -> None:
        """Clip the whole gradient; what that sends is counted with its first bucket."""
        if self.clip is None or not self._waiting:
            return
        gradients, limit = [bucket.grad for bucket in self._waiting], self.clip * self._loss_scale.value
        self.steps.begin_counts()
        carried_out(clip_to_(gradients, limit, self._comm, norm=self._clip_norm), self._comm)

    @property
    def _needs_whole_gradient(self) -> bool:
        return self.steps.whole_model or self.clip is not None

    def _decide(self) -> None:
        error = self.steps.decide(is_bad=bool(self.steps.findings), error_of=self._error_of)
        if error is not None:
            self._errors.append(error)
        self.steps.put_back()  # what ends the backward, which takes the error then

    def _error_of(self, findings: list[Finding]) -> NonFiniteGradient:
        return carried_out(report(findings, self.steps.stats[0].step, self._device), self._comm)

    def _release_all(self) -> None:
        """Give DDP zeros where nothing can be reduced any more, so that backward ends and raises."""
        left = [*self.steps.abandon(), *self._waiting]
        self._waiting.clear()
        for bucket in left:
            bucket.grad.zero_()
            bucket.put_back()
