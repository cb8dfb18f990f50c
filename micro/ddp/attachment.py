"""A reducer at work on a DistributedDataParallel model, through DDP's communication hook."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from micro.checkpoints.saved_state import plain_buckets
from micro.clipping import ClipNorm
from micro.ddp.backward import Backward
from micro.ddp.bucket import Bucket
from micro.ddp.bucket_order import replay
from micro.ddp.hook import Hook
from micro.ddp.reduction import Reduction
from micro.ddp.vectors import BucketVectors
from micro.drivers.attachment import BaseAttachment
from micro.drivers.bucket_states import BucketStates
from micro.drivers.changed_gradients import ChangedGradients, keeps
from micro.drivers.discarded_gradients import DiscardedGradients
from micro.drivers.lane import CallerLane, ThreadLane
from micro.drivers.loss_scale import LossScale
from micro.flat import Layout, real
from micro.group_comm import GroupComm
from micro.nonfinite import NonFiniteGradient
from micro.peer_failures import PeerFailures
from micro.private_comm import PrivateComm
from micro.reducers.base import Reducer, prepare
from micro.spans import Seconds
from micro.summary import StepSummary
from micro.wrappers import plain_parameters, reduced_parameters


class Attachment(BaseAttachment):
    """A reducer at work on a DDP model. Build it with ``attach``; it is a context manager that closes it.

    The hook puts each bucket on a lane, where buckets are reduced in the order of their numbers.

    Where the reducer raises on one rank alone, the backward of that rank raises the error as it is, and the backward of
    every other rank, within seconds, a RuntimeError that names the rank and the error. A process group that was made
    for the attachment is given up. One of yours, and the model's own, is left in the middle of a collective: it serves
    for nothing more. After that the attachment can only be closed. On NCCL, over such a group, the other ranks wait
    until its timeout: there leave process_group and lane out, or give the group a short timeout.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        *,
        whole_model: bool,
        clip: float | None,
        clip_norm: ClipNorm | str,
        timed: bool,
        lane: str,
        process_group: dist.ProcessGroup | None,
        on_step: Callable[[StepSummary], object] | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        parameters = plain_parameters(model.module)
        trained = {name: real(p) for name, p in parameters.items() if p.requires_grad}
        hook = Hook.of(model)
        self.reducer = reducer
        self._model = ref(model)  # which holds this attachment, where no garbage collector looks
        self._scope = "model" if whole_model else "bucket"
        self._vectors = BucketVectors({parameter: name for name, parameter in parameters.items()})
        self._finds_unused = bool(model.find_unused_parameters)
        self._is_rehearsing = False
        self._on_step = on_step
        self._device = next(iter(trained.values())).device
        self.comm: GroupComm
        if lane == "thread" and process_group is None:
            self.comm = PrivateComm(model.process_group, self._device, timed=timed)
        else:
            shared = process_group or model.process_group
            self.comm = GroupComm(shared, timed=timed, failures=PeerFailures(shared))
        prepare(reducer, self.comm, self._device)
        self._states = BucketStates(reducer, {name: real(p) for name, p in parameters.items()})
        self._loss_scale = LossScale(scaler)
        self._reduction = Reduction(
            reducer,
            self._states,
            self.comm,
            self._device,
            lane=ThreadLane(self._device) if lane == "thread" else CallerLane(self._device),
            loss_scale=self._loss_scale,
            whole_model=whole_model,
            clip=clip,
            clip_norm=clip_norm,
        )
        self.steps = self._reduction.steps
        reduced = reduced_parameters(model)
        self._backward = Backward(
            model,
            len(reduced),
            self._now,
            at_computed=self._reduction.finish,
            at_end=self._end_step,
            wait=self._reduction.wait,
        )
        self._discarded = DiscardedGradients(list(reduced.values()))
        self._changed = ChangedGradients(reduced) if keeps(reducer) and not self._loss_scale.is_used else None
        self._hook = ref(hook)  # DDP's reducer holds the hook, and the hook this
        hook.attached = self

    @property
    def rank(self) -> int:
        """This rank in the process group of the model."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the model."""
        return self.comm.world_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group over which gradients are reduced."""
        return self.comm.group

    @property
    def _clipped(self) -> Reduction:
        return self._reduction

    def close(self) -> None:
        """Take the reducer off the model: DDP averages the gradients again, by a dense all-reduce.

        The lane ends, and the process group unless it is yours. Statistics and state can still be read, and the model
        can be attached to again. All ranks close at the same step, between two steps. It may be called again.

        A rank that leaves a ``with`` block by an exception closes too; the other ranks then fail and do not wait.
        """
        hook = self._hook()
        if hook is not None and hook.attached is self:
            hook.attached = None
        self._discarded.close()
        if self._changed is not None:
            self._changed.close()
        self._reduction.close()
        self.comm.close()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, NonFiniteGradient):  # which all ranks raise
            self.comm.report(error)
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, by parameter name, and selector states; see BaseAttachment."""
        state = super().state_dict()
        order = {name: number for number, name in enumerate(name for names in self.bucket_names for name in names)}
        state["buckets"].sort(key=lambda bucket: order.get(next(iter(bucket["shapes"])), len(order)))
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; see BaseAttachment.

        Called before the first backward, it also has DDP make the buckets that were saved, so that the next steps are
        those of a run that was never interrupted.
        """
        super().load_state_dict(saved)
        model, buckets = self._model(), plain_buckets(saved["buckets"])
        if buckets and model is not None and not self.bucket_names:
            names = [tuple(bucket["shapes"]) for bucket in buckets]
            with self.rehearsal():
                replay(model, reduced_parameters(model), names)
            self.bucket_names[:] = names

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Let backward go by in this context without reducing anything.

        DDP makes new buckets before its second forward, in the order in which gradients were ready in the first
        backward. One rehearsal on all ranks before the first step lets every step have the same buckets. The gradients
        are this rank's own then. After a restart ``load_state_dict`` does what is needed, unless parameters have hooks.
        """
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Put one bucket of DDP on the lane, where it is reduced in place; DDP waits for the future."""
        grad = bucket.buffer()
        names, vectors = self._vectors.of(bucket.parameters(), grad)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[grad.device] if grad.is_cuda else None)
        if self._is_rehearsing or self._is_paused:
            if self._is_rehearsing:
                self._rehearse(bucket.index(), names)
            future.set_result(grad)
            return future
        is_first, is_last = self._backward.place(bucket, names)
        if is_first:
            self._reduction.forget_errors()
            self._reduction.begin(has_inputs=self._backward.has_inputs(), counts_inputs=self._backward.counts_inputs())
        self._put(vectors, grad, future)
        if is_last:
            self._reduction.end(waits_at_once=self._backward.is_static)
        self._reduction.hand_over()
        if is_last:
            self._backward.wait_for_end()
        return future

    def _put(
        self, vectors: Sequence[tuple[Layout, Tensor]], grad: Tensor, future: torch.futures.Future[Tensor]
    ) -> None:
        for layout, vector in vectors:
            gradients = tuple(layout.split(vector).values()) if self._finds_unused else ()
            is_last = layout is vectors[-1][0]
            self._reduction.put(Bucket(layout, vector, gradients, grad, future if is_last else None))
        if not vectors:
            future.set_result(grad)

    def _rehearse(self, index: int, names: tuple[str, ...]) -> None:
        if index == 0:
            self.bucket_names.clear()
        self.bucket_names.append(names)

    def _now(self) -> Seconds:
        return self.comm.now(self._device)

    def _end_step(self, exposed: Seconds) -> None:
        """Raise what went wrong in this step, or report it."""
        self.steps.exposed = exposed
        error = self._reduction.take_error()
        if error is None:
            self._report()
            return
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, which would hold it

    def _report(self) -> None:
        self._discarded.end_backward(is_applied=not self.skipped)
        if self._changed is not None:
            self._changed.end_backward(is_applied=not self.skipped)
        if self._on_step is not None:
            self._on_step(self.summary)
