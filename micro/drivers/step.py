"""One step: begin the reduction of each vector, decide on all together, and write updates; and states of buckets."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from micro.comm.group import GroupComm
from micro.comm.loop import Running, carried_out
from micro.comm.requests import AllGather, Reduction
from micro.drivers.arrivals import note, note_whole, refusal
from micro.drivers.gradient_watch import GradientWatch
from micro.drivers.loss_scale import LossScale
from micro.drivers.memory_order import as_in_memory, logical, orders_of_shards
from micro.drivers.summary import StepSummary
from micro.drivers.unused import without_unused
from micro.reducers.base import BucketState, Reducer, saved_layout
from micro.reducers.outcome import Outcome, arrived_at
from micro.reducers.stats import StepStats
from micro.values.flat import Layout, joined
from micro.values.nonfinite import Finding, NonFiniteGradient, error_of_skipping

Clip = Callable[[Sequence[Tensor], float], Reduction[None]]
"""Scales the parts of a gradient down to a norm; see micro.values.clipping."""


class Vector(Protocol):
    """Gradients of a model as one vector."""

    @property
    def layout(self) -> Layout:
        """Of the parameters."""

    @property
    def grad(self) -> Tensor:
        """The gradients (numel,), and then the update."""

    def put_back(self) -> None:
        """Make ``grad`` the gradients of the model."""


Unused = Callable[[Sequence[Any]], Reduction[Collection[str]]]
"""Finds which parameters of vectors no rank has used, the same on all ranks."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A reduction that was begun.

    Attributes:
        vectors: those that ``grad`` (numel,) holds one after the other.
    """

    running: Running[Outcome]
    state: BucketState
    vectors: Sequence[Vector]
    grad: Tensor

    def put_back(self) -> None:
        if self.grad is not self.vectors[0].grad:
            pieces = self.grad.split([vector.layout.numel for vector in self.vectors])
            for vector, piece in zip(self.vectors, pieces, strict=True):
                vector.grad.copy_(piece)
        for vector in self.vectors:
            vector.put_back()


class BucketStates:
    """The states of a model's buckets on one rank.

    An old bucket stays whole until new ones hold all of its parameters: to copy what is left of it each time would take
    as many copies as there are buckets.

    Args:
        reducer: whose states they are.
        parameters: of the model, by name.
    """

    def __init__(self, reducer: Reducer, parameters: Mapping[str, Tensor]) -> None:
        self._reducer = reducer
        self._parameters = parameters
        self._states: dict[tuple[str, ...], BucketState] = {}
        self._old: list[BucketState] = []

    def of(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state of the bucket with these parameters; a new bucket takes over what was kept for them."""
        if layout.names not in self._states:
            names = set(layout.names)
            former = [state for state in self._states.values() if not names.isdisjoint(state.layout.names)]
            holders = [state for state in self._old if not names.isdisjoint(self._unclaimed(state))]
            new = self._reducer.rebuild(layout, [*holders, *former], dtype, device)  # of two the later counts
            for state in former:
                del self._states[state.layout.names]
            self._states[layout.names] = new
            self._old = [state for state in [*self._old, *former] if self._unclaimed(state)]
        return self._states[layout.names]

    def residuals(self) -> list[Tensor]:
        """Return the residuals, one vector per bucket, not copied; empty where the reducer keeps none."""
        self._settle()
        return [state.residual for state in self._states.values()]

    def save(self) -> list[dict[str, Any]]:
        """Return the states as plain data and tensors, the elements of each parameter in logical order."""
        self._settle()
        saved = [self._reducer.save(state) for state in self._states.values()]
        return [logical(each, self._parameters) | self._orders(each) for each in saved]

    def _orders(self, bucket: dict[str, Any]) -> dict[str, Any]:
        orders = orders_of_shards(bucket, self._parameters)
        return {"orders": orders} if orders else {}

    def rescale_(self, factor: float) -> None:
        """Multiply all that is kept by ``factor``; see Reducer."""
        for state in self._all():
            self._reducer.rescale_(state, factor)

    def break_off(self, error: BaseException) -> None:
        """Note that ``error`` ended a step in its middle, so that no state is saved; loaded ones are whole."""
        for state in self._all():
            state.break_off(error)

    @property
    def step(self) -> int:
        """Steps done."""
        return max((state.step for state in self._states.values()), default=0)

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Put what ``save`` returned in place of all states; where it does not fit, they stay as they are.

        Raises:
            ValueError: it names parameters that the model does not have, or of other shapes, or is of another method,
                or holds shards of parameters in another memory format.
        """
        states: dict[tuple[str, ...], BucketState] = {}
        for bucket in saved:
            layout = saved_layout(bucket)
            for name, shape in zip(layout.names, layout.shapes, strict=True):
                own = tuple(self._parameters[name].shape) if name in self._parameters else "none"
                if own != shape:
                    raise ValueError(f"state holds '{name}' of shape {shape}, the model has {own}")
            if bucket.get("orders", {}) != self._orders(bucket).get("orders", {}):
                raise ValueError(
                    "state holds shards of parameters in another memory format: load it into a model in that"
                )
            one = self._parameters[layout.names[0]]
            placed = as_in_memory(bucket, self._parameters)
            states[layout.names] = self._reducer.load(placed, one.dtype, one.device)
        self._states, self._old = states, []

    def _all(self) -> Iterable[BucketState]:
        return [*self._states.values(), *self._old]

    def _unclaimed(self, state: BucketState) -> list[str]:
        """Return the parameters of a state that no present bucket holds."""
        claimed = {name for names in self._states for name in names}
        return [name for name in state.layout.names if name not in claimed]

    def _settle(self) -> None:
        """Give what no new bucket has claimed a bucket of its own; after a step there is none of it as a rule."""
        for state in self._old:
            shapes = dict(zip(state.layout.names, state.layout.shapes, strict=True))
            names = tuple(self._unclaimed(state))
            rest = Layout(names, tuple(shapes[name] for name in names))
            residual = state.residual
            self._states[names] = self._reducer.rebuild(rest, [state], residual.dtype, residual.device)
        self._old = []


class ModelStep:
    """Reduces the vectors of a step, several of them at a time; the step counts for all of them, or for none.

    Args:
        reducer, states, comm: what reduces, what it remembers, over which ranks.
        device: of the gradients.
        loss_scale: the factor on the gradients.
        whole_model: select over all vectors at once.
        clip: the greatest norm of the gradient, which ``clip_`` bounds; may be changed between steps.
        error_of: makes the error of a step that was not finite; all ranks call it.
        parameters: the model's by name, for which to note what arrived; see micro.drivers.arrivals.

    Attributes:
        stats: of the last step, one per reduction, in the order in which they were begun.
        bucket_names: the parameters of each vector, in the same order.
        skipped: whether the last step was dropped; the same on all ranks.
        exposed_s: seconds of the last backward after all gradients were computed: the communication it did not hide.
        error: what this step has to raise, if anything.
        has_failed: whether an error ended a step in its middle: nothing can be reduced any more.
    """

    def __init__(
        self,
        reducer: Reducer,
        states: BucketStates,
        comm: GroupComm,
        device: torch.device,
        *,
        loss_scale: LossScale,
        whole_model: bool,
        clip: float | None,
        clip_: Clip,
        error_of: Callable[[list[Finding]], NonFiniteGradient],
        parameters: Mapping[str, Tensor],
    ) -> None:
        self.stats: list[StepStats] = []
        self.bucket_names: list[tuple[str, ...]] = []
        self.skipped = self.has_failed = False
        self._is_finite = True  # what has ended of this step
        self.exposed_s: float = 0.0
        self.error: BaseException | None = None
        self.whole_model, self.clip = whole_model, clip
        self.reducer, self.states, self.comm = reducer, states, comm
        self._device, self._loss_scale = device, loss_scale
        self._clip_, self._error_of = clip_, error_of
        self._num_skipped = 0  # steps one after the other, up to the last
        self._parameters, self._refusal = parameters, refusal(reducer)
        self._shares = reducer.shares_rounds
        self._begun: list[_Begun] = []
        self._ended: list[tuple[_Begun, Outcome]] = []

    @property
    def has_begun(self) -> bool:
        """Whether vectors were begun that are not decided."""
        return bool(self._begun or self._ended)

    @property
    def needs_whole_gradient(self) -> bool:
        """Whether nothing can be begun before the last vector is there."""
        return self.whole_model or self.clip is not None

    def begin(self, *, has_inputs: bool = True, counts_inputs: bool = False) -> float:
        """Begin a step; all ranks call this. Return the factor by which its gradients are to be multiplied.

        Args:
            has_inputs: whether this rank has inputs.
            counts_inputs: whether the mean is over the ranks that have some; the same on all ranks.

        Raises:
            ValueError: ranks have different scales of the loss.
        """
        self.stats.clear()
        self.bucket_names.clear()
        self.skipped, self.error, self._is_finite = False, None, True
        self.comm.begin_step()
        if not counts_inputs and not self._loss_scale.is_used:
            return 1.0
        active = self._active_scales(has_inputs)
        factor = self._loss_scale.follow(active)
        if factor != 1:
            self.states.rescale_(factor)
        return self.comm.world_size / len(active) if counts_inputs else 1.0

    def _active_scales(self, has_inputs: bool) -> dict[int, float]:
        """Return the scale of each rank that has inputs, by one message of 16 bytes a rank and step.

        A rank that is out of inputs in a join context takes the scale of the others, which its own scaler lacks.
        """
        mine = torch.tensor([has_inputs, self._loss_scale.current], dtype=torch.float64, device=self._device)
        rows = self.comm.answer(AllGather(mine=mine)).tolist()  # host sync: once a step, with a scaler or such a join
        ranks = dist.get_process_group_ranks(self.comm.group)
        return {rank: scale for rank, (is_active, scale) in zip(ranks, rows, strict=True) if is_active}

    def launch(self, vectors: Sequence[Vector], unused: Unused | None = None) -> None:
        """Begin to reduce these vectors, clipped first; all ranks begin the same ones in the same order.

        Args:
            unused: finds the parameters that no rank has used. They get no update, so what is kept of them waits.
        """
        if self.clip is not None:
            limit = self.clip * self._loss_scale.value
            carried_out(self._clip_([vector.grad for vector in vectors], limit), self.comm)
        for part in [vectors] if self.whole_model and vectors else [[vector] for vector in vectors]:
            layout, grad = part[0].layout, part[0].grad
            if len(part) > 1:
                layout = layout.kept(joined, *[vector.layout for vector in part[1:]])
                grad = torch.cat([vector.grad for vector in part])
            state = self.states.of(layout, grad.dtype, grad.device)
            if self.bucket_names:
                self.comm.begin_step()  # what came before the first is counted with it
            self.bucket_names += [vector.layout.names for vector in part]
            reduce = partial(self.reducer.reduction, state, grad)
            if unused is not None and state.pieces():
                reduce = partial(without_unused, reduce, state, partial(unused, part))
            self._begun.append(_Begun(self.comm.loop.begin(reduce, self.comm, shares=self._shares), state, part, grad))

    def advance(self) -> None:
        """Send a round of messages; end reductions that need no more, but for the last that was begun."""
        self.comm.loop.advance()
        while len(self._begun) > 1 and self._begun[0].running.is_done:
            self._end_first()

    def _end_first(self) -> None:
        begun = self._begun[0]
        outcome = self.comm.loop.finish(begun.running)
        self._is_finite &= not outcome.findings
        self._ended.append((begun, outcome))
        del self._begun[0]

    def end(self) -> bool:
        """Wait for the ends of all reductions; return whether all was finite."""
        while self._begun:
            self._end_first()
        return self._is_finite

    def decide(self, *, is_finite: bool) -> None:
        """Deliver all reductions, or drop all of them, and put the vectors back.

        A scaler looks for Inf in the gradients, to lower the scale and to leave out the optimizer's step: there the
        update of a step that is dropped is Inf everywhere, and it is no error.

        Args:
            is_finite: whether all was finite, the same on all ranks.
        """
        self.skipped = not is_finite
        scales = self._loss_scale.is_used
        for begun, outcome in self._ended:
            self.stats.append(outcome.deliver() if is_finite else outcome.drop())
            grad = begun.grad
            arrived = outcome.arrived if is_finite else partial(arrived_at, (), grad.numel(), grad.device)
            latest, layout = begun.state.latest, begun.state.layout
            latest.arrived = arrived and cache(arrived)
            if not latest.is_followed:
                note(self._parameters, layout, latest, refusal=self._refusal)
            if scales and not is_finite:
                grad.fill_(torch.inf)
        if is_finite:
            self._num_skipped = 0
        elif not scales:
            self.error = self._error()
        ended, self._ended = self._ended, []
        for begun, _ in ended:
            begun.put_back()

    def _error(self) -> BaseException | None:
        """Return what a step has to raise that is not finite, where no scaler acts on it; all ranks call this."""
        if self.reducer.policy == "stop":
            return self._error_of([finding for _, outcome in self._ended for finding in outcome.findings])
        self._num_skipped += 1
        return error_of_skipping(self._num_skipped, max(map(attrgetter("step"), self.stats), default=0))

    def end_backward(
        self, exposed_s: float, watch: GradientWatch, on_step: Callable[[StepSummary], object] | None
    ) -> None:
        """Raise the error of the step, or have ``watch`` check what the loop does, and report the step."""
        self.exposed_s = exposed_s
        watch.settle()
        error = self.error
        if error is None:
            watch.end_backward(is_applied=not self.skipped)
            if on_step is not None and self.stats:
                on_step(StepSummary(tuple(self.stats), exposed_s))
            return
        try:
            raise error
        finally:
            del error  # otherwise a reference cycle: the traceback holds this frame

    def close(self) -> None:
        """Reduce nothing any more: what comes for a parameter from now on is a whole gradient."""
        note_whole(self._parameters)

    def fail(self, error: BaseException) -> None:
        """Give up after an error in the middle of a step, which the other ranks learn of."""
        self.give_up(error)
        self.comm.abort(error)

    def give_up(self, error: BaseException) -> None:
        """Note that ``error``, which the other ranks know of, ended a step in its middle."""
        if not self.has_failed:
            self.error, self.has_failed = error, True
        self.states.break_off(error)

    def abandon(self) -> Iterable[Vector]:
        """Give up what has not been decided; return its vectors."""
        given_up = [*(begun for begun, _ in self._ended), *self._begun]
        self._ended.clear()
        self._begun.clear()
        return [vector for begun in given_up for vector in begun.vectors]
