"""A reducer at work on a DistributedDataParallel model, through DDP's communication hook."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from micro.comm.group import GroupComm, PrivateComm
from micro.comm.loop import carried_out
from micro.comm.peers import PeerFailures
from micro.comm.requests import Reduction
from micro.ddp.backward import Backward
from micro.ddp.bucket_lane import BucketLane
from micro.ddp.bucket_order import replay
from micro.ddp.buckets import Buckets, parts_of
from micro.ddp.hook import hook_of
from micro.drivers.attachment import BaseAttachment
from micro.drivers.lane import CallerLane, thread_lane
from micro.drivers.settings import Settings
from micro.drivers.wrappers import kept_parameters, plain_parameters, reduced_parameters
from micro.reducers.base import Reducer, prepare
from micro.values.clipping import clip_
from micro.values.flat import real
from micro.values.nonfinite import Finding, NonFiniteGradient, report


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
        settings: Settings,
        *,
        lane: str,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        parameters, reduced = plain_parameters(model.module), reduced_parameters(model)
        hook, device = hook_of(model), next(iter(reduced.values())).device
        comm: GroupComm
        if lane == "thread" and process_group is None:
            comm = PrivateComm(model.process_group, device, timed=settings.timed)
        else:
            shared = process_group or model.process_group
            comm = GroupComm(shared, timed=settings.timed, failures=PeerFailures(shared))
        prepare(reducer, comm, device)
        among = comm if settings.clip_norm == "global" else None
        kept = {name: real(parameter) for name, parameter in parameters.items()}

        def clip(vectors: Sequence[Tensor], limit: float) -> Reduction[None]:
            return clip_(vectors, limit, among=among)

        self._start(reducer, comm, settings, kept=kept, reduced=reduced, compares=True, clip_=clip)
        self._scope = "model" if settings.whole_model else "bucket"
        self._model = ref(model)  # which holds this attachment, where no garbage collector looks
        self._buckets = Buckets({parameter: name for name, parameter in parameters.items()}, reduced.values())
        self._is_rehearsing = False
        made = thread_lane(device) if lane == "thread" else CallerLane(device)
        self._lane = BucketLane(self.steps, made, device, finds_unused=bool(model.find_unused_parameters))
        self._backward = Backward(model, self._lane, now=self._now, at_end=self._end_step)
        self._hook = ref(hook)  # DDP's reducer holds the hook, and the hook this
        hook.attached = self

    def close(self) -> None:
        """Take the reducer off the model: DDP averages the gradients again, by a dense all-reduce.

        The lane ends, and the process group unless it is yours. Statistics and state can still be read, and the model
        can be attached to again. All ranks close at the same step, between two steps. It may be called again.

        A rank that leaves a ``with`` block by an exception closes too; the other ranks then fail and do not wait.
        """
        hook = self._hook()
        if hook is not None and hook.attached is self:
            hook.attached = None
        self._stop_watching()
        self._lane.close()
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
        model = self._model()
        if saved["buckets"] and model is not None and not self.bucket_names:
            names = [tuple(bucket["shapes"]) for bucket in saved["buckets"]]
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
        """Have one bucket of DDP reduced in place on the lane; DDP waits for the future."""
        grad = bucket.buffer()
        names, layouts = self._buckets.of(bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[grad.device] if grad.is_cuda else None)
        if self._is_rehearsing:
            self.bucket_names[:] = [*(self.bucket_names if bucket.index() else ()), names]
        is_reduced = not (self._is_rehearsing or self._is_paused)
        if not is_reduced or not layouts:
            future.set_result(grad)
        if is_reduced:
            self._backward.receive(bucket, names, parts_of(layouts, grad, future))
        return future

    def averages(self, parameter: Tensor) -> bool:
        """Return whether one of DDP's buckets holds ``parameter``."""
        return id(parameter) in self._buckets.parameters

    def present_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the model as it is now, by name, without those that DDP was told to ignore."""
        model = self._model()
        return {} if model is None else kept_parameters(model)

    def _error_of(self, findings: list[Finding]) -> NonFiniteGradient:
        return carried_out(report(findings, self.steps.stats[0].step, self._device), self.comm)
