"""A reducer at work on a DistributedDataParallel model, through DDP's communication hook."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from micro.bucket_states import BucketStates
from micro.checks import check_reducer
from micro.clipping import ClipNorm, check_clip
from micro.comm import GroupComm
from micro.ddp.bucket_order import replay
from micro.ddp.checks import (
    check_group,
    check_lane,
    check_model,
    check_on_step,
    check_parameters,
    refused_together,
)
from micro.ddp.chosen_parameters import Choice, reduced_parameters, split_by
from micro.ddp.discarded_gradients import DiscardedGradients
from micro.ddp.hook import Hook
from micro.ddp.loss_scale import LossScale, check_scaler
from micro.ddp.reduction import Bucket, Reduction
from micro.ddp.vectors import vectors_of
from micro.description import describe
from micro.flat import Layout, real
from micro.lane import CallerLane, LaneChoice, ThreadLane
from micro.private_comm import PrivateComm
from micro.reducers.base import Reducer, prepare
from micro.saved_state import check_header, header, plain_buckets
from micro.scope import Scope, scoped
from micro.stats import StepStats
from micro.summary import StepSummary
from micro.wrappers import plain_parameters, unwrapped

NO_BACKWARD = -1  # what torch has for the number of the graph where none is computed


def attach(
    model: nn.Module,
    reducer: Reducer,
    *,
    scope: Scope | str = "bucket",
    only: Choice | None = None,
    dense: Choice | None = None,
    start_step: int = 0,
    clip: float | None = None,
    clip_norm: ClipNorm | str = "rank",
    timed: bool = False,
    lane: LaneChoice | str = "auto",
    process_group: dist.ProcessGroup | None = None,
    on_step: Callable[[StepSummary], object] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> "Attachment":
    """Let ``reducer`` average the gradients of ``model`` from now on, while backward goes on.

    Call it once, on all ranks of the model, after it is wrapped and before its first backward. The training loop stays
    as it is: ``no_sync``, ``join``, frozen and unused parameters, mixed dtypes, checkpointed activations and
    gradient_as_bucket_view work as they do without it. A rank that has joined, because it is out of inputs, goes on to
    send what its residual holds, with a gradient of zero: what it kept is its share of earlier means. A complex
    parameter is reduced as the real and imaginary parts of its elements, as DDP does.

    Args:
        model: a DistributedDataParallel, or one inside torch.compile or a framework's wrapper.
        scope: the vector in which indices are selected: each of DDP's buckets, each parameter by itself, or all
            parameters together. A bucket travels as one in any case: what is selected within parameters is sent bucket
            by bucket, and so is what is selected within the whole model, once the last bucket is there.
        only, dense: the parameters to reduce sparsely, or those to reduce densely; all others are the other way. Each a
            pattern of names or several (``*`` is any text, ``?`` one character, ``[ab]`` a or b; names as
            ``model.module.named_parameters()`` gives them, without wrappers' words), or a function of name and
            parameter that returns a bool.
            Dense parameters of a bucket travel as a vector of their own; see Split.
        start_step: reduce everything densely up to this step, without indices.
        clip: the greatest norm of the gradient; a larger one is scaled down before anything else. That needs the whole
            gradient, so that backward hides no communication any more. torch's clip_grad_norm_ after
            backward bounds the sparse update instead, which holds residuals of many steps, and loses what it cuts off.
        clip_norm: 'rank': each rank's own norm, and each scales its own gradient. 'global': the root of the mean over
            ranks of the squared norms, which bounds the norm of the mean gradient, and all ranks scale alike; one more
            all-reduce, of 8 bytes.
        timed: measure the parts of each step (select_s, exchange_s, rest_s) on an accelerator too, where the host then
            waits for the device about ten times a bucket; without it these are times of the host. On a CPU they are
            right either way.
        lane: "thread" reduces in a thread of its own while backward goes on, over a group of its own. "caller" reduces
            in the thread of backward, over the model's own group: one thread and one communicator, so that all ranks
            launch all collectives in one order. "auto" is "caller" on GPUs where backward has collectives of its own
            (find_unused_parameters, SyncBatchNorm), else "thread"; say "caller" on NCCL for others that it cannot see.
            The updates are the same. micro.lane says why.
        process_group: the ranks of the model in a group that nothing else uses while backward runs. By default a
            group is made for the thread, with the backend, the timeout and the options of the model's own, and
            destroyed by ``close``; yours is left as it is.
        on_step: called on this rank with the statistics of each step, at the end of its backward, before the optimizer
            steps. An exception in it comes out of backward(); the gradients are reduced then. See
            micro.integrations.wandb and micro.integrations.tensorboard.
        scaler: the GradScaler that scales the loss. A step that is not finite is left to it, whatever the reducer's
            policy: all gradients become Inf, so that the scaler leaves out the optimizer's step and lowers the scale.
            What is kept follows the scale. clip is in units of unscaled gradients.

    Returns:
        the attachment, which holds the statistics of the last step and everything a checkpoint needs.

    Raises:
        ValueError: the model is not a DistributedDataParallel, has a communication hook, makes sparse gradients, or
            the reducer cannot select within this scope; only or dense match nothing, the same parameters, or leave
            none to sparsify; its parameters are on several devices or one has too many elements; or clip, the reducer
            or process_group is none. Raised on all ranks where it is raised on one, and nothing is left behind.
        NonFiniteGradient: out of backward(), on all ranks, if the policy is to stop. All gradients are zero then, and
            residuals are as if nothing had been sent; DDP's own work is done, so the model can be trained on.
    """
    model = unwrapped(model)
    with refused_together(model):
        check_model(model)
        check_clip(clip, clip_norm)
        check_on_step(on_step)
        check_scaler(scaler, check_reducer(reducer))
        lane = check_lane(lane, model)
        check_group(process_group, model, lane=lane)
        trained = reduced_parameters(model)
        reducer = split_by(check_reducer(reducer), trained, only=only, dense=dense, start_step=start_step)
        reducer = scoped(reducer, scope)
        check_parameters(trained, whole_model=scope == "model")
        Hook.check(model)
    return Attachment(
        model,
        reducer,
        whole_model=scope == "model",
        clip=clip,
        clip_norm=clip_norm,
        timed=timed,
        lane=lane,
        process_group=process_group,
        on_step=on_step,
        scaler=scaler,
    )


def detach(model: nn.Module) -> None:
    """Close what is attached to ``model``: DDP averages its gradients again. See Attachment.close.

    Raises:
        ValueError: nothing is attached to it.
    """
    attached = Hook.attached_to(unwrapped(model))
    if not isinstance(attached, Attachment):
        raise ValueError("model has no attachment: there is nothing to detach")
    attached.close()


class Attachment:
    """A reducer at work on a DDP model. Build it with ``attach``; it is a context manager that closes it.

    The hook puts each bucket on a lane, where buckets are reduced in the order of their numbers.

    Where the reducer raises on one rank alone, that rank gives up the process group that was made for the attachment:
    its backward raises the error as it is, and the backward of every other rank raises, within seconds on gloo, that a
    peer has left. (A group of yours, and the model's own, is not given up: there the others wait for its timeout.)
    After that the attachment can only be closed.
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
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._finds_unused = bool(model.find_unused_parameters)
        self._is_rehearsing = False
        self._is_paused = False
        self._on_step = on_step
        self._device = next(iter(trained.values())).device
        self.comm: GroupComm
        if lane == "thread" and process_group is None:
            self.comm = PrivateComm(model.process_group, self._device, timed=timed)
        else:
            self.comm = GroupComm(process_group or model.process_group, timed=timed)
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
        self._compute_end_s: float | None = None
        self._num_parameters = len(reduced_parameters(model))
        self._received: set[str] = set()  # the parameters of the buckets of this backward so far
        self._discarded = DiscardedGradients(list(reduced_parameters(model).values()))
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
    def stats(self) -> tuple[StepStats, ...]:
        """The statistics of the last step, one per reduced vector in the order in which they were reduced."""
        return tuple(self._reduction.last_step.stats)

    @property
    def skipped(self) -> bool:
        """Whether the last step was not finite, so that the update of all buckets is zero; the same on all ranks.

        A loop that must not move in such a step, by momentum or weight decay, leaves out ``optimizer.step()``. Where
        micro.attach was given a scaler, the update is Inf and the scaler does that.
        """
        return self._reduction.last_step.skipped

    @property
    def summary(self) -> StepSummary:
        """The statistics of the last step over all buckets.

        Raises:
            ValueError: no step was taken yet.
        """
        if not self.stats:
            raise ValueError("there is no step yet to be summarized: call backward first")
        return StepSummary(self.stats, self.exposed_s)

    @property
    def bucket_names(self) -> list[tuple[str, ...]]:
        """The parameters of each of DDP's buckets, in the order of the last backward."""
        return self._reduction.last_step.bucket_names

    @property
    def exposed_s(self) -> float:
        """Seconds of the last backward after all gradients were computed: the communication it did not hide."""
        return self._reduction.last_step.exposed_s

    @property
    def clip(self) -> float | None:
        """The greatest norm of the gradient, see attach; may be changed from step to step, on all ranks alike."""
        return self._reduction.clip

    @clip.setter
    def clip(self, limit: float | None) -> None:
        check_clip(limit)
        self._reduction.clip = limit

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
        self._reduction.close()
        self.comm.close()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type["CopiedAttachment"], tuple[()]]:
        return CopiedAttachment, ()

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one vector per bucket, not copied; empty where the reducer keeps none."""
        return self._states.residuals()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, by parameter name, and selector states; save one per rank.

        It says whose it is: format, version, rank, world size, step, and the method with all settings. Everything is
        plain data and tensors, which ``torch.load(weights_only=True)`` reads.
        """
        order = {name: number for number, name in enumerate(name for names in self.bucket_names for name in names)}
        buckets = sorted(self._states.save(), key=lambda bucket: order.get(next(iter(bucket["shapes"])), len(order)))
        head = header(step=self._states.step, **self._identity())
        return {**head, "loss_scale": self._loss_scale.value, "buckets": buckets}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on the same rank; buckets may have changed since.

        Called before the first backward, it also has DDP make the buckets that were saved, so that the next steps are
        those of a run that was never interrupted. Density, start_step, seed, nonfinite and clip may be others than
        before. A state without version, of micro before 0.2, is loaded unless it is of another method.

        Raises:
            ValueError: it is of another rank, world size, method or newer version, or names parameters that the model
                does not have, or of other shapes.
        """
        check_header(saved, **self._identity())
        buckets = plain_buckets(saved["buckets"])
        self._states.load(buckets)
        self._loss_scale.value = saved.get("loss_scale", 1.0)
        model = self._model()
        if buckets and model is not None and not self.bucket_names:
            names = [tuple(bucket["shapes"]) for bucket in buckets]
            with self.rehearsal():
                replay(model, reduced_parameters(model), names)
            self.bucket_names[:] = names

    def _identity(self) -> dict[str, Any]:
        return {
            "rank": self.comm.rank,
            "world_size": self.comm.world_size,
            "scope": self._scope,
            "method": describe(self.reducer),
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward reduce nothing in this context: its gradients stay this rank's own, residuals as they are.

        For a backward whose gradients are not used: a discriminator's while the generator is trained, one for logging.
        All ranks pause the same ones. What was not sent of such a backward would otherwise wait in the residuals
        and be added to later steps. ``model.no_sync()`` does the same where the forward is in it too; gradients
        that are not removed then are part of the next step, and so they are here.
        """
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

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
        grad, parameters = bucket.buffer(), bucket.parameters()
        named = {self._names[parameter]: parameter for parameter in parameters}
        names = tuple(named)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[grad.device] if grad.is_cuda else None)
        if self._is_rehearsing or self._is_paused:
            if self._is_rehearsing:
                self._rehearse(bucket.index(), names)
            future.set_result(grad)
            return future
        is_first, is_last = self._place_in_backward(bucket, names)
        if is_first:
            self._begin_backward()
            self._reduction.begin(self._is_active())
        self._put(vectors_of(named, grad), grad, future)
        if is_last:
            self._reduction.end()
            self._await_end()
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

    def _place_in_backward(self, bucket: dist.GradBucket, names: tuple[str, ...]) -> tuple[bool, bool]:
        """Tell whether a bucket is the first and whether it is the last of its backward.

        In the first backward of a static graph DDP calls all buckets number 0 and none the last: there the parameters
        show it.
        """
        is_first = bucket.index() == 0 and (not self._received or not self._received.isdisjoint(names))
        if is_first:
            self._received.clear()
        self._received.update(names)
        is_last = bucket.is_last() or len(self._received) == self._num_parameters
        if is_last:
            self._received.clear()
        return is_first, is_last

    def _begin_backward(self) -> None:
        """Forget a backward of which ``_end_backward`` never ran.

        Where two attached models share a backward and both have an error, autograd raises the first and drops the call
        of the second. What was left of it must neither hide an error of this backward nor be raised in its place.
        """
        self._compute_end_s = None
        self._reduction.forget_errors()

    def _await_end(self) -> None:
        """Have what went wrong raised once DDP's own work is done; called with the last bucket of a backward.

        With the last and not before: where activations are computed again in backward, by a backward of their own
        (use_reentrant=True), each of those has an end too. An error raised at the first would leave DDP with buckets
        that never become ready.

        In a join context no backward runs on a rank that is out of inputs: DDP calls the hook for zero gradients and
        then waits. There the hook itself raises.
        """
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            _at_end_of_backward(self._note_compute_end)
            return
        self._reduction.wait()
        self._end_step()

    def _is_active(self) -> bool | None:
        """Whether this rank has inputs, where a join context asks for the mean over the ranks that have; else None."""
        model = self._model()
        if model is None or getattr(model, "_divide_by_initial_world_size", True):
            return None
        return torch._C._current_graph_task_id() != NO_BACKWARD

    def _note_compute_end(self) -> None:
        """Note when DDP begins to wait."""
        self._compute_end_s = self.comm.now(self._device)
        _at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        assert self._compute_end_s is not None
        self._reduction.last_step.exposed_s = self.comm.now(self._device) - self._compute_end_s
        self._compute_end_s = None
        self._end_step()

    def _end_step(self) -> None:
        """Raise what went wrong in this step, or tell of it."""
        error = self._reduction.take_error()
        if error is None:
            self._tell()
            return
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, which would hold it

    def _tell(self) -> None:
        self._discarded.end_backward(is_applied=not self.skipped)
        if self._on_step is not None:
            self._on_step(self.summary)


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Have autograd's engine call this after all gradients are computed, and after what was queued before.

    What DDP does at the end, to wait for the futures, it queues behind the hooks of all buckets. An error raised by
    such a call comes out of backward() with its type; raised in a hook it would leave DDP waiting, and raised by a
    future it would lose its type. Inside of a backward that another one calls, this is the end of the inner one, as
    it is for DDP.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


class CopiedAttachment:
    """What copy, deepcopy and pickle make of an attachment: it is attached to no model, and says so."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"no '{name}': a copy of an attachment is attached to no model, call micro.attach on yours"
        )
