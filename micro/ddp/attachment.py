"""The attachment of a reducer to a DistributedDataParallel model, through DDP's communication hook."""

from collections.abc import Callable, Iterator, Sequence
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
from micro.ddp.backward import Bucket, BucketLane, Buckets, parts_of
from micro.ddp.bucket_order import replay
from micro.ddp.hook import hook_of
from micro.drivers.attachment import BaseAttachment
from micro.drivers.lane import CallerLane, thread_lane
from micro.drivers.settings import Settings
from micro.drivers.wrappers import kept_parameters, plain_parameters, reduced_parameters
from micro.reducers.base import Reducer, prepare
from micro.values.clipping import clip_
from micro.values.flat import real
from micro.values.nonfinite import Finding, NonFiniteGradient, report

NO_BACKWARD = -1  # the graph task id that torch returns outside of a backward


class Attachment(BaseAttachment):
    """The attachment of a reducer to a DDP model. Build it with ``attach``; a context manager that closes it.

    The hook puts each bucket on a lane, which reduces buckets in order.

    If the reducer raises on one rank only, backward raises that error there, and within seconds a RuntimeError with the
    rank and the error on every other rank. A process group created for the attachment is aborted. Your group, or the
    model's, is left in the middle of a collective and no longer usable. The attachment can then only be closed. On
    NCCL, with such a group, the other ranks wait for its timeout: leave out process_group and lane, or set a short
    timeout.
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
        self._model = ref(model)  # weak: C++ makes the model hold this, which no garbage collector sees
        self._buckets = Buckets({parameter: name for name, parameter in parameters.items()}, reduced.values())
        self._is_rehearsing = False
        made = thread_lane(device) if lane == "thread" else CallerLane(device)
        self._lane = BucketLane(self.steps, made, device, finds_unused=bool(model.find_unused_parameters))
        self._num_reduced = int(model._get_ddp_logging_data()["num_parameter_tensors"])  # trained when DDP was built
        self._received: set[str] = set()  # names in this backward's buckets so far
        self._compute_end: float = 0.0
        self._hook = ref(hook)  # weak: the hook holds this attachment
        hook.attached = self

    def close(self) -> None:
        """Detach the reducer: DDP averages gradients again, by a dense all-reduce.

        The lane ends, and the process group unless it is yours. Statistics and state can still be read, and the model
        can be attached again. All ranks must close between the same two steps. Closing twice is allowed.

        A rank that leaves a ``with`` block by an exception closes too; the other ranks then fail instead of waiting.
        """
        hook = self._hook()
        if hook is not None and hook.attached is self:
            hook.attached = None
        self._stop_watching()
        self._lane.close()
        self.comm.close()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, NonFiniteGradient):  # this one all ranks raise
            self.comm.report(error)
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, by parameter name, and selector states; see BaseAttachment."""
        state = super().state_dict()
        order = {name: number for number, name in enumerate(name for names in self.bucket_names for name in names)}
        state["buckets"].sort(key=lambda bucket: order.get(next(iter(bucket["shapes"])), len(order)))
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; see BaseAttachment.

        Before the first backward it also restores DDP's buckets, so that the next steps equal those of an uninterrupted
        run.
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
        """Run backward in this context without reducing anything.

        DDP rebuilds buckets before its second forward, in the order of gradients in the first backward. With one
        rehearsal on all ranks before the first step, all steps have the same buckets. Its gradients are not averaged.
        After a restart, ``load_state_dict`` restores the buckets, unless parameters have hooks.
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
            self._receive(bucket, names, parts_of(layouts, grad, future))
        return future

    def _receive(self, bucket: dist.GradBucket, names: tuple[str, ...], parts: Sequence[Bucket]) -> None:
        """Give the parts of a bucket to the lane.

        In the first backward of a static graph every bucket has index 0 and none says that it is the last. There the
        number of received parameters shows it; elsewhere it does not, because DDP also reduces parameters that were
        frozen after it was built. With a static graph DDP waits for the buckets as soon as the last hook returns.

        If two attached models share a backward and both fail, autograd raises the first error and never calls the end
        of the second. The second's next first bucket then ends that backward.

        In a join context a rank without inputs runs no backward: DDP calls the hook for zero gradients and then waits.
        The step then ends here, and the mean may be over the ranks that have inputs.
        """
        model = self._model()
        assert model is not None, "its own backward runs"
        has_inputs, is_static = torch._C._current_graph_task_id() != NO_BACKWARD, bool(model.static_graph)
        if bucket.index() == 0 and (not self._received or not self._received.isdisjoint(names)):
            self._received.clear()
            counts_inputs = not getattr(model, "_divide_by_initial_world_size", True)
            self._lane.begin(has_inputs=has_inputs, counts_inputs=counts_inputs)
        self._received.update(names)
        is_last = bucket.is_last() or (is_static and len(self._received) == self._num_reduced)
        self._lane.put(parts, ends=is_last and (self._lane.is_beside or is_static or not has_inputs))
        if not is_last:
            return
        self._received.clear()
        if has_inputs:
            _at_end_of_backward(self._computed)
        else:
            started = self._now()
            self._lane.wait()
            self.steps.end_backward(self._now() - started, self._watch, self._on_step)

    def _computed(self) -> None:
        """Note when DDP begins to wait. Only now does a lane in this thread wait for its collectives."""
        self._compute_end = self._now()
        self._lane.finish()
        _at_end_of_backward(self._end)

    def _end(self) -> None:
        self.steps.end_backward(self._now() - self._compute_end, self._watch, self._on_step)

    def averages(self, parameter: Tensor) -> bool:
        """Return whether one of DDP's buckets holds ``parameter``."""
        return id(parameter) in self._buckets.parameters

    def present_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the model as it is now, by name, without those that DDP was told to ignore."""
        model = self._model()
        return {} if model is None else kept_parameters(model)

    def _error_of(self, findings: list[Finding]) -> NonFiniteGradient:
        return carried_out(report(findings, self.steps.stats[0].step, self._device), self.comm)


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Have autograd's engine call this when all gradients are computed, after the calls that were queued earlier.

    An error raised in such a call leaves backward() with its type. Raised in a hook it would leave DDP waiting, and
    raised by a future it would lose its type. DDP queues its own call, which waits for the futures, after the hooks of
    all buckets. In a nested backward (activation checkpointing with use_reentrant=True) the call runs at the end of the
    inner one, as DDP's does; so it is queued with the last bucket.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
