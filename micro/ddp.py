"""The one driver: DDP's communication hook."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from micro.clipping import check_clip, clip_
from micro.comm import GroupComm, private_group
from micro.exchanges.in_pieces import InPieces
from micro.flat import Layout
from micro.lane import Lane
from micro.nonfinite import NonFiniteGradient
from micro.reducers.base import BucketState, Reducer, saved_layout
from micro.reducers.sparse import SparseReducer
from micro.selectors.per_tensor import PerTensor
from micro.stats import StepStats

Scope = Literal["bucket", "tensor", "model"]


def attach(
    model: DistributedDataParallel,
    reducer: Reducer,
    *,
    scope: Scope | str = "bucket",
    clip: float | None = None,
    timed: bool = True,
) -> "Attachment":
    """Let ``reducer`` average the gradients of ``model`` from now on, while backward goes on.

    Call it once, on all ranks of the model, after it is wrapped and before its first backward. The training loop stays
    as it is: ``no_sync``, frozen and unused parameters, mixed dtypes and gradient_as_bucket_view work as they do
    without it.

    Args:
        scope: the vector in which indices are chosen, whatever DDP's buckets are: each of these buckets, each
            parameter by itself, or all parameters together. What travels together is a bucket in any case: a choice
            within tensors is sent bucket by bucket, and so is one within the whole model, once the last bucket is
            there.
        clip: the greatest norm of this rank's gradient; a larger one is scaled down before anything else, for which all
            of it must be there, so that nothing is hidden behind backward any more.
        timed: measure the parts of each step; on an accelerator that makes the lane's thread wait for its stream.

    Returns:
        the attachment, which holds the statistics of the last step and everything a checkpoint needs.

    Raises:
        ValueError: the model is not a DistributedDataParallel, has a communication hook, makes sparse gradients, or
            the reducer cannot choose within this scope, or clip is not positive.
        NonFiniteGradient: out of backward(), on all ranks, if the policy is to stop. The bucket's gradients are zero
            then; DDP's own work is done, so the model can be trained on.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"model must be wrapped in DistributedDataParallel, got {type(model).__name__}")
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"gradients must be dense tensors, '{name}' makes sparse ones: build it with sparse=False")
    check_clip(clip)
    return Attachment(model, scoped(reducer, scope), whole_model=scope == "model", clip=clip, timed=timed)


def scoped(reducer: Reducer, scope: Scope | str) -> Reducer:
    """Return ``reducer`` as it chooses within ``scope``; see attach.

    Raises:
        ValueError: no such scope, or the reducer chooses nothing, or cannot send its choice in pieces.
    """
    if scope not in get_args(Scope):
        raise ValueError(f"scope must be one of {', '.join(get_args(Scope))}, got '{scope}'")
    if scope == "bucket":
        return reducer
    if not isinstance(reducer, SparseReducer):
        raise ValueError(f"scope={scope} means nothing for {reducer.name}, which chooses no elements: use scope=bucket")
    if scope == "model":
        _ = InPieces(each=reducer.exchange, ends=(1,))  # refuses what cannot be sent bucket by bucket
        return reducer
    return replace(reducer, selector=PerTensor(selector=reducer.selector))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket of DDP on its way through the lane.

    Attributes:
        is_first: it is the first of its backward.
        layout: of its gradients in the vector ``grad`` (numel,).
        gradients: views of ``grad``, one per parameter, where it matters which of them are used; else empty.
        future: what DDP waits for.
    """

    is_first: bool
    layout: Layout
    grad: Tensor
    gradients: Sequence[Tensor]
    future: torch.futures.Future[Tensor]


class Attachment:
    """A reducer at work on a DDP model: its buckets' states, kept by parameter name.

    The hook puts each bucket on a lane and returns; there buckets are reduced in the order of their numbers, over a
    process group of their own.

    Attributes:
        exposed_s: seconds of the last backward that went by after all gradients were computed: what it did not hide.
        bucket_names: the parameters of each of DDP's buckets, in the order of the last backward.
        clip: see attach; may be changed from step to step, on all ranks alike.
    """

    def __init__(
        self, model: DistributedDataParallel, reducer: Reducer, *, whole_model: bool, clip: float | None, timed: bool
    ) -> None:
        parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        if whole_model and len({p.dtype for p in parameters.values()}) > 1:
            raise ValueError("scope=model needs parameters of one dtype, which this model has not: use scope=bucket")
        try:
            model.register_comm_hook(self, _hook)
        except RuntimeError as error:  # DDP's own words name neither the model nor the remedy
            raise ValueError("model already has a communication hook, and DDP takes one: wrap it anew") from error
        self.reducer = reducer
        self.comm = GroupComm(private_group(model.process_group), timed=timed)
        self.clip = clip
        self.exposed_s = 0.0
        self.bucket_names: list[tuple[str, ...]] = []
        self._names = {parameter: name for name, parameter in model.module.named_parameters()}
        self._watch_unused = bool(model.find_unused_parameters)
        self._num_parameters = len(set(parameters) - set(model.parameters_to_ignore))
        self._whole_model = whole_model
        self._is_rehearsing = False
        self._device = next(iter(parameters.values())).device
        self._lane = Lane(self._device)
        self._step: int | None = None
        self._buckets: dict[tuple[str, ...], BucketState] = {}
        self._waiting: list[_Bucket] = []
        self._running: list[tuple[Callable[[], StepStats], Sequence[_Bucket], Tensor]] = []
        self._stats: list[StepStats] = []
        self._errors: list[BaseException] = []
        self._is_lost = False
        self._computed_at: float | None = None

    @property
    def stats(self) -> tuple[StepStats, ...]:
        """The statistics of the last step, one per reduced vector in the order in which they were reduced."""
        return tuple(self._stats)

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one vector per bucket, not copied; empty where the reducer keeps none."""
        return [bucket.residual for bucket in self._buckets.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, by parameter name, and selector states; save one per rank."""
        return {"buckets": [self.reducer.save(bucket) for bucket in self._buckets.values()]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on the same rank; buckets may have changed since.

        Raises:
            ValueError: it names parameters that the model does not have, or of other shapes.
        """
        known = {name: tuple(parameter.shape) for parameter, name in self._names.items()}
        layouts = [saved_layout(bucket) for bucket in saved["buckets"]]
        for layout in layouts:
            for name, shape in zip(layout.names, layout.shapes, strict=True):
                if known.get(name) != shape:
                    raise ValueError(f"state holds '{name}' of shape {shape}, the model has {known.get(name, 'none')}")
        by_name = {name: parameter for parameter, name in self._names.items()}
        self._buckets = {}
        for layout, bucket in zip(layouts, saved["buckets"], strict=True):
            parameter = by_name[layout.names[0]]
            self._buckets[layout.names] = self.reducer.load(bucket, parameter.dtype, parameter.device)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Let backward go by in this context without reducing anything.

        DDP makes new buckets before its second forward, in the order in which gradients came in the first backward.
        One rehearsal on all ranks before the first step, or before the first after a restart, lets every step have
        the buckets that it would have in a run that was never interrupted. The gradients are this rank's own then.
        """
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Put one bucket of DDP on the lane, where it is reduced in place; DDP waits for the future."""
        grad, parameters = bucket.buffer(), bucket.parameters()
        names = tuple(self._names[parameter] for parameter in parameters)
        layout = Layout(names, tuple(tuple(parameter.shape) for parameter in parameters))
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[grad.device] if grad.is_cuda else None)
        if self._is_rehearsing:
            self._rehearse(bucket.index(), names)
            future.set_result(grad)
            return future
        gradients = bucket.gradients() if self._watch_unused else ()
        self._lane.put(partial(self._arrive, _Bucket(bucket.index() == 0, layout, grad, gradients, future)))
        _at_end_of_backward(self._note_end_of_compute)
        return future

    def _rehearse(self, index: int, names: tuple[str, ...]) -> None:
        if index == 0:
            self.bucket_names.clear()
        self.bucket_names.append(names)

    # On the lane

    def _arrive(self, bucket: _Bucket) -> None:
        self._waiting.append(bucket)
        try:
            self._advance()
        except BaseException as error:  # nobody would hear of it here: backward raises it
            self._errors.append(error)
            self._is_lost = True
        if self._is_lost:
            self._give_up()

    def _advance(self) -> None:
        """Start what can be started; end what runs while nothing else has come."""
        if self._is_lost:
            return
        if self._is_ready():
            if self.clip is not None:
                clip_([bucket.grad for bucket in self._waiting], self.clip)
            if self._whole_model:
                self._launch(list(self._waiting), *self._joined(self._waiting))
            else:
                for bucket in self._waiting:
                    self._launch([bucket], bucket.grad, bucket.layout, self.reducer)
            self._waiting.clear()
        while self._running and (self._lane.is_idle or len(self._running) > 1):
            self._finish()

    def _is_ready(self) -> bool:
        """Whether what waits can be reduced: anything can, unless all of the gradient is needed first."""
        if not self._whole_model and self.clip is None:
            return True
        return sum(len(bucket.layout.names) for bucket in self._waiting) == self._num_parameters

    def _launch(self, buckets: Sequence[_Bucket], grad: Tensor, layout: Layout, reducer: Reducer) -> None:
        state = self._state_of(layout, grad)
        if buckets[0].is_first and state.step != self._step:
            self._step = state.step
            self._stats.clear()
            self.bucket_names.clear()
        self.bucket_names += [bucket.layout.names for bucket in buckets]
        self.comm.begin_step()
        parked = self._park_unused_([view for bucket in buckets for view in bucket.gradients], state)
        finish: Callable[[], StepStats]
        try:
            finish = reducer.launch(state, grad, self.comm)
        except NonFiniteGradient as error:
            finish = partial(_raise, error)
        finally:
            for key, place, kept in parked:
                state.memory[key][place] = kept
        self._running.append((finish, buckets, grad))

    def _finish(self) -> None:
        finish, buckets, grad = self._running[0]
        try:
            self._stats.append(finish())
        except NonFiniteGradient as error:
            grad.zero_()
            self._errors.append(error)
        if grad is not buckets[0].grad:
            for bucket, piece in zip(buckets, grad.split([b.layout.numel for b in buckets]), strict=True):
                bucket.grad.copy_(piece)
        del self._running[0]
        for bucket in buckets:
            bucket.future.set_result(bucket.grad)

    def _give_up(self) -> None:
        """Let DDP go on with zeros where nothing can be reduced any more, so that backward ends and raises."""
        left = [*(bucket for _, buckets, _ in self._running for bucket in buckets), *self._waiting]
        self._running.clear()
        self._waiting.clear()
        for bucket in left:
            if not bucket.future.done():
                bucket.future.set_result(bucket.grad.zero_())

    def _joined(self, buckets: Sequence[_Bucket]) -> tuple[Tensor, Layout, Reducer]:
        """Return all buckets as one vector, and the reducer that sends a choice within it bucket by bucket."""
        if len(buckets) == 1:
            return buckets[0].grad, buckets[0].layout, self.reducer
        names = tuple(name for bucket in buckets for name in bucket.layout.names)
        shapes = tuple(shape for bucket in buckets for shape in bucket.layout.shapes)
        ends = tuple(accumulate(bucket.layout.numel for bucket in buckets))
        assert isinstance(self.reducer, SparseReducer)
        in_pieces = InPieces(each=self.reducer.exchange, ends=ends)
        vector = torch.cat([bucket.grad for bucket in buckets])
        return vector, Layout(names, shapes), replace(self.reducer, exchange=in_pieces)

    # At the end of backward, in its own thread

    def _note_end_of_compute(self) -> None:
        """Note when DDP begins to wait; called once per bucket, of which the first counts."""
        if self._computed_at is None:
            self._computed_at = self.comm.now(self._device)
            _at_end_of_backward(self._end)

    def _end(self) -> None:
        assert self._computed_at is not None
        self.exposed_s = self.comm.now(self._device) - self._computed_at
        self._computed_at = None
        errors = list(self._errors)
        if not self._is_lost:
            self._errors.clear()
        if errors:
            raise errors[0]

    # States

    def _state_of(self, layout: Layout, grad: Tensor) -> BucketState:
        if layout.names not in self._buckets:
            self._buckets[layout.names] = self.reducer.rebuild(layout, self._take(layout), grad.dtype, grad.device)
        return self._buckets[layout.names]

    def _take(self, layout: Layout) -> list[BucketState]:
        """Remove the new bucket's parameters from the old buckets that hold them, and return those."""
        wanted = set(layout.names)
        old = [bucket for names, bucket in self._buckets.items() if wanted & set(names)]
        for bucket in old:
            del self._buckets[bucket.layout.names]
            rest = [
                (name, shape)
                for name, shape in zip(bucket.layout.names, bucket.layout.shapes, strict=True)
                if name not in wanted
            ]
            if rest:  # other new buckets will come for these
                kept = Layout(tuple(name for name, _ in rest), tuple(shape for _, shape in rest))
                residual = bucket.residual
                self._buckets[kept.names] = self.reducer.rebuild(kept, [bucket], residual.dtype, residual.device)
        return old

    def _park_unused_(self, gradients: Sequence[Tensor], state: BucketState) -> list[tuple[str, slice, Tensor]]:
        """Set aside what is kept for parameters that no rank used: DDP would drop what was sent for them."""
        vectors = {key: vector for key, vector in state.memory.items() if vector.numel()}
        if not self._watch_unused or not vectors:
            return []
        used = torch.stack([gradient.any() for gradient in gradients]).to(torch.int32)
        self.comm.all_reduce_(used, "counts")
        parked = []
        for (_, place), anywhere in zip(state.layout.slices(), used.tolist(), strict=True):  # host sync: which to park
            if not anywhere:
                for key, vector in vectors.items():
                    parked.append((key, place, vector[place].clone()))
                    vector[place] = 0
        return parked


def _raise(error: Exception) -> NoReturn:
    raise error


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Have autograd's engine call this after all gradients are computed, and after what was queued before.

    What DDP does at the end, to wait for the futures, it queues behind the hooks of all buckets. An error raised by
    such a call comes out of backward() with its type; raised in a hook it would leave DDP waiting, and raised by a
    future it would lose its type.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _hook(state: Attachment, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)
