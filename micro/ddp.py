"""The one driver: DDP's communication hook."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from micro.comm import GroupComm, private_group
from micro.flat import Layout
from micro.health import NonFiniteGradient
from micro.reducers.base import BucketState, Reducer, saved_layout
from micro.stats import StepStats


def attach(model: DistributedDataParallel, reducer: Reducer, *, timed: bool = True) -> "Attachment":
    """Let ``reducer`` average the gradients of ``model`` from now on.

    Call it once, on all ranks of the model, after it is wrapped and before its first backward. The training loop stays
    as it is: ``no_sync``, frozen and unused parameters, mixed dtypes and gradient_as_bucket_view work as they do
    without it. Selection runs per bucket of DDP; wrap with a large ``bucket_cap_mb`` to select over the whole model.

    Args:
        timed: measure the parts of each step; on an accelerator that makes the host wait for the device.

    Returns:
        the attachment, which holds the statistics of the last step and everything a checkpoint needs.

    Raises:
        ValueError: the model is not a DistributedDataParallel, has a communication hook, or makes sparse gradients.
        NonFiniteGradient: out of backward(), on all ranks, if the policy is to stop. The bucket's gradients are zero
            then; DDP's own work is done, so the model can be trained on.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"model must be wrapped in DistributedDataParallel, got {type(model).__name__}")
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"gradients must be dense tensors, '{name}' makes sparse ones: build it with sparse=False")
    return Attachment(model, reducer, timed=timed)


class Attachment:
    """A reducer at work on a DDP model: its buckets' states, kept by parameter name."""

    def __init__(self, model: DistributedDataParallel, reducer: Reducer, *, timed: bool) -> None:
        try:
            model.register_comm_hook(self, _hook)
        except RuntimeError as error:  # DDP's own words name neither the model nor the remedy
            raise ValueError("model already has a communication hook, and DDP takes one: wrap it anew") from error
        self.reducer = reducer
        self.comm = GroupComm(private_group(model.process_group), timed=timed)
        self._names = {parameter: name for name, parameter in model.module.named_parameters()}
        self._watch_unused = bool(model.find_unused_parameters)
        self._numbered = not model.static_graph  # in its first backward, all buckets of a static graph have number 0
        self._step: int | None = None
        self._buckets: dict[tuple[str, ...], BucketState] = {}
        self._running: list[tuple[Callable[[], StepStats], torch.futures.Future[Tensor], Tensor]] = []
        self._stats: list[StepStats] = []

    @property
    def stats(self) -> tuple[StepStats, ...]:
        """The statistics of the last step, one per bucket in the order in which they were reduced."""
        return tuple(self._stats)

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

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce one bucket of DDP in place; DDP waits for the future.

        All reductions end in the hook of the last bucket, when backward has nothing left to hide them.
        """
        grad = bucket.buffer()
        state = self._state_of(bucket, grad)
        if bucket.index() == 0 and state.step != self._step:
            self._step = state.step
            self._stats.clear()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[grad.device] if grad.is_cuda else None)
        self._running.append((self._launch(bucket, state, grad), future, grad))
        self._numbered = self._numbered or bucket.index() > 0
        if bucket.is_last() or not self._numbered:
            self._finish()
        return future

    def _launch(self, bucket: dist.GradBucket, state: BucketState, grad: Tensor) -> Callable[[], StepStats]:
        self.comm.begin_step()
        parked = self._park_unused_(bucket, state)
        try:
            return self.reducer.launch(state, grad, self.comm)
        except NonFiniteGradient as error:
            return partial(_raise, error)
        finally:
            for key, place, kept in parked:
                state.memory[key][place] = kept

    def _finish(self) -> None:
        errors = []
        for finish, future, grad in self._running:
            try:
                self._stats.append(finish())
            except NonFiniteGradient as error:
                grad.zero_()
                errors.append(error)
            future.set_result(grad)
        self._running.clear()
        if errors:
            _raise_after_backward(errors[0])

    def _state_of(self, bucket: dist.GradBucket, grad: Tensor) -> BucketState:
        parameters = bucket.parameters()
        names = tuple(self._names[parameter] for parameter in parameters)
        if names not in self._buckets:
            layout = Layout(names, tuple(tuple(parameter.shape) for parameter in parameters))
            self._buckets[names] = self.reducer.rebuild(layout, self._take(layout), grad.dtype, grad.device)
        return self._buckets[names]

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

    def _park_unused_(self, bucket: dist.GradBucket, state: BucketState) -> list[tuple[str, slice, Tensor]]:
        """Set aside what is kept for parameters that no rank used: DDP would drop what was sent for them."""
        vectors = {key: vector for key, vector in state.memory.items() if vector.numel()}
        if not self._watch_unused or not vectors:
            return []
        used = torch.stack([gradient.any() for gradient in bucket.gradients()]).to(torch.int32)
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


def _raise_after_backward(error: Exception) -> None:
    """Raise once DDP has ended this backward, in a callback that it queues after the last hook; see autograd's engine.

    Raised in a hook, the error would leave DDP waiting for the rest; raised by a future, it would lose its type.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(partial(_raise, error)))


def _hook(state: Attachment, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)
