"""What happens to DDP's buckets on the lane: reduced one after the other, decided together, and handed back to DDP."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from micro.clipping import ClipNorm, clip_to_
from micro.ddp.bucket import Bucket, Running
from micro.ddp.unused_parameters import unused_parameters
from micro.drivers.bucket_states import BucketStates
from micro.drivers.lane import Lane
from micro.drivers.last_step_stats import LastStep
from micro.drivers.loss_scale import LossScale, common_scale
from micro.drivers.set_aside import SetAside
from micro.flat import Layout
from micro.group_comm import GroupComm
from micro.kernels.threads import one_while
from micro.reducers.base import Reducer
from micro.reducers.outcome import Outcome, decide
from micro.requests import AllGather, carried_out
from micro.scope import joined


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
        self._has_counts = False
        self.last_step = LastStep()
        self._reducer = reducer
        self._states = states
        self._comm = comm
        self._whole_model = whole_model
        self._device = device
        self._lane = lane
        self._loss_scale = loss_scale
        self._weight = 1.0  # of the gradients of this backward
        self._waiting: list[Bucket] = []
        self._running: list[Running] = []
        self._finished: list[tuple[Running, Outcome]] = []
        self._errors: list[BaseException] = []
        self._has_failed = False
        self._backward_runs = False  # beside the lane, whose loops then leave the threads to it
        self._parts: list[Callable[[], None]] = []  # of a backward, to be handed over
        self._uses: list[Tensor] = []  # the memory that they use
        self._ends_with_backward = not lane.is_beside and device.type == "cpu"
        self._must_finish = False

    @property
    def skipped(self) -> bool:
        """Whether the last step was taken back."""
        return self.last_step.skipped

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
        self.last_step.begin()
        scale = self._weight = 1.0
        if self._has_failed:
            return
        if counts_inputs or self._loss_scale.is_used:
            active = self._active_scales(has_inputs)
            scale = common_scale(active)
            if counts_inputs:
                self._weight = self._comm.world_size / len(active)
        factor = self._loss_scale.follow(scale)
        if factor != 1:
            self._states.rescale_(factor)

    def _active_scales(self, has_inputs: bool) -> dict[int, float]:
        """Return the scale of each rank that has inputs, by one message of 16 bytes a rank and step.

        A rank that is out of inputs in a join context takes the scale of the others, which its own scaler lacks.
        """
        self._begin_counts()
        mine = torch.tensor([has_inputs, self._loss_scale.current], dtype=torch.float64, device=self._device)
        rows = self._comm.answer(AllGather(mine=mine))
        scales = enumerate(rows.tolist())  # host sync: once a step, with a scaler or such a join context
        return {rank: scale for rank, (is_active, scale) in scales if is_active}

    def _begin_counts(self) -> None:
        """Begin to count what is sent; all until the first bucket is launched is counted with it."""
        if not self._has_counts:
            self._comm.begin_step()
            self._has_counts = True

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
            if self._whole_model and self._waiting:
                self._launch_joined(list(self._waiting))
            else:
                for bucket in self._waiting:
                    self._launch(self._reducer, [bucket], bucket.grad, bucket.layout)
            self._waiting.clear()
        self._comm.rounds.advance()
        while self._running and (is_last or self._may_finish()):
            self._finish_first()
        if is_last:
            self._decide()

    def _may_finish(self) -> bool:
        """Whether the first bucket can be finished before the last was launched; the same on all ranks.

        Where that would only wait, in the thread of backward, it is left for the end.
        """
        if self._ends_with_backward and self._reducer.is_one_sum:
            return False
        return len(self._running) > 1 and self._running[0].begun.is_done

    def _finish_first(self) -> None:
        running = self._running[0]
        self._finished.append((running, running.begun()))
        del self._running[0]

    def _clip(self) -> None:
        """Clip the whole gradient; what that sends is counted with its first bucket."""
        if self.clip is None or not self._waiting:
            return
        gradients, limit = [bucket.grad for bucket in self._waiting], self.clip * self._loss_scale.value
        self._begin_counts()
        carried_out(clip_to_(gradients, limit, self._comm, norm=self._clip_norm), self._comm)

    @property
    def _needs_whole_gradient(self) -> bool:
        return self._whole_model or self.clip is not None

    def _launch_joined(self, buckets: Sequence[Bucket]) -> None:
        reducer, layout = joined(self._reducer, [bucket.layout for bucket in buckets])
        grad = buckets[0].grad if len(buckets) == 1 else torch.cat([bucket.grad for bucket in buckets])
        self._launch(reducer, buckets, grad, layout)

    def _launch(self, reducer: Reducer, buckets: Sequence[Bucket], grad: Tensor, layout: Layout) -> None:
        state = self._states.of(layout, grad.dtype, grad.device)
        self.last_step.bucket_names += [bucket.layout.names for bucket in buckets]
        self._begin_counts()
        self._has_counts = False
        gradients = [view for bucket in buckets for view in bucket.gradients]
        set_aside = SetAside(state, unused_parameters(state, gradients, self._comm))
        try:
            begun = reducer.begin(state, grad, self._comm)
        except BaseException:
            set_aside.restore()
            raise
        self._running.append(Running(begun, buckets, grad, set_aside))

    def _decide(self) -> None:
        """Let the step count, or take all of it back, and give DDP its buckets.

        A scaler looks for Inf in the gradients, to lower the scale and to leave out the optimizer's step: there the
        update of a step that was taken back is Inf everywhere.
        """
        policy = "skip" if self._loss_scale.is_used else self._reducer.policy
        decision = carried_out(decide([outcome for _, outcome in self._finished], policy), self._comm)
        finished, self._finished = self._finished, []
        self.last_step.stats += decision.stats
        if decision.error is not None:
            self._errors.append(decision.error)
        for running, _ in finished:
            running.set_aside.restore()
            if self.skipped and self._loss_scale.is_used:
                running.grad.fill_(torch.inf)
            running.hand_back()

    def _release_all(self) -> None:
        """Give DDP zeros where nothing can be reduced any more, so that backward ends and raises."""
        launched = [*(running for running, _ in self._finished), *self._running]
        for running in launched:
            running.set_aside.restore()
        left = [*(bucket for running in launched for bucket in running.buckets), *self._waiting]
        self._finished.clear()
        self._running.clear()
        self._waiting.clear()
        for bucket in left:
            bucket.grad.zero_()
            bucket.hand_back()
