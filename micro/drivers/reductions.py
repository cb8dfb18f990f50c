"""The vectors of one step on their way: begun one after the other, decided together, and put back."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from micro.comm.group import GroupComm
from micro.comm.loop import Running, carried_out
from micro.comm.requests import AllGather
from micro.comm.requests import Reduction as Requests
from micro.drivers.arrivals import note, note_whole, refusal
from micro.drivers.bucket_states import BucketStates
from micro.drivers.loss_scale import LossScale
from micro.reducers.base import BucketState, Reducer
from micro.reducers.outcome import Outcome, arrived_at
from micro.reducers.scope import joined
from micro.reducers.stats import StepStats
from micro.values.flat import Layout
from micro.values.nonfinite import Finding, NonFiniteGradient, SkippedSteps

Clip = Callable[[Sequence[Tensor], float], Requests[None]]
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


@dataclass(frozen=True, slots=True)
class _Running:
    """A reduction that was begun.

    Attributes:
        vectors: those that ``grad`` (numel,) holds one after the other.
        set_aside: what the state keeps, by key and parameter, for parameters that no rank used; zero in the state.
    """

    under_way: Running[Outcome]
    state: BucketState
    vectors: Sequence[Vector]
    grad: Tensor
    set_aside: dict[tuple[str, str], Tensor]

    def put_back(self) -> None:
        if self.grad is not self.vectors[0].grad:
            pieces = self.grad.split([vector.layout.numel for vector in self.vectors])
            for vector, piece in zip(self.vectors, pieces, strict=True):
                vector.grad.copy_(piece)
        for vector in self.vectors:
            vector.put_back()


class Reductions:
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
        self.exposed_s: float = 0.0
        self.error: BaseException | None = None
        self.whole_model, self.clip = whole_model, clip
        self.reducer, self.states, self.comm = reducer, states, comm
        self._device, self._loss_scale = device, loss_scale
        self._clip_, self._error_of = clip_, error_of
        self._skipped_steps = SkippedSteps()
        self._parameters, self._refusal = parameters, refusal(reducer)
        self._running: list[_Running] = []
        self._ended: list[tuple[_Running, Outcome]] = []

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
        self.skipped, self.error = False, None
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

    def launch(
        self,
        vectors: Sequence[Vector],
        unused: Callable[[Sequence[Vector]], Collection[str]] | None = None,
    ) -> None:
        """Begin to reduce these vectors, clipped first; all ranks begin the same ones in the same order.

        Args:
            unused: returns the parameters that no rank has used; all ranks call it together. They get no update, so
                what is kept of them waits.
        """
        if self.clip is not None:
            limit = self.clip * self._loss_scale.value
            carried_out(self._clip_([vector.grad for vector in vectors], limit), self.comm)
        for part in [vectors] if self.whole_model and vectors else [[vector] for vector in vectors]:
            layout = joined([vector.layout for vector in part])
            grad = part[0].grad if len(part) == 1 else torch.cat([vector.grad for vector in part])
            state = self.states.of(layout, grad.dtype, grad.device)
            if self.bucket_names:
                self.comm.begin_step()  # what came before the first is counted with it
            self.bucket_names += [vector.layout.names for vector in part]
            aside = {} if unused is None or not state.pieces() else set_aside_(state, unused(part))
            begin = partial(self.reducer.reduction, state, grad)
            under_way = self.comm.loop.begin(begin, self.comm, shares=self.reducer.shares_rounds)
            self._running.append(_Running(under_way, state, part, grad, aside))

    def advance(self) -> None:
        """Send a round of messages; end reductions that need no more, but for the last that was begun."""
        self.comm.loop.advance()
        while len(self._running) > 1 and self._running[0].under_way.is_done:
            self._end_first()

    def _end_first(self) -> None:
        running = self._running[0]
        self._ended.append((running, self.comm.loop.finish(running.under_way)))
        del self._running[0]

    def end(self) -> bool:
        """Wait for the ends of all reductions; return whether all was finite."""
        while self._running:
            self._end_first()
        return not any(outcome.findings for _, outcome in self._ended)

    def decide(self, *, is_finite: bool) -> None:
        """Deliver all reductions, or drop all of them, and put the vectors back.

        A scaler looks for Inf in the gradients, to lower the scale and to leave out the optimizer's step: there the
        update of a step that is dropped is Inf everywhere, and it is no error.

        Args:
            is_finite: whether all was finite, the same on all ranks.
        """
        self.stats += [outcome.deliver() if is_finite else outcome.drop() for _, outcome in self._ended]
        self.skipped = not is_finite
        scales = self._loss_scale.is_used
        for running, outcome in self._ended:
            restore_(running.state, running.set_aside)
            grad, layout = running.grad, running.state.layout
            arrived = outcome.arrived if is_finite else partial(arrived_at, (), grad.numel(), grad.device)
            note(self._parameters, layout, arrived, refusal=self._refusal)
            if scales and not is_finite:
                grad.fill_(torch.inf)
        if not scales:
            self.error = self._error(is_finite=is_finite)
        ended, self._ended = self._ended, []
        for running, _ in ended:
            running.put_back()

    def _error(self, *, is_finite: bool) -> BaseException | None:
        """Return what a step has to raise where no scaler acts on what is not finite; all ranks call this."""
        if not is_finite and self.reducer.policy == "stop":
            return self._error_of([finding for _, outcome in self._ended for finding in outcome.findings])
        return self._skipped_steps.count(max((stats.step for stats in self.stats), default=0), is_finite=is_finite)

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
        given_up = [*(running for running, _ in self._ended), *self._running]
        self._ended.clear()
        self._running.clear()
        return [vector for running in given_up for vector in running.vectors]


def set_aside_(state: BucketState, names: Collection[str]) -> dict[tuple[str, str], Tensor]:
    """Take what is kept for these parameters out of a state; return it, by key and parameter."""
    kept = {}
    for key, pieces in state.pieces(set(names)).items() if names else ():
        for name, piece in pieces.items():
            kept[key, name] = piece.clone()
            piece.zero_()
    return kept


def restore_(state: BucketState, kept: Mapping[tuple[str, str], Tensor]) -> None:
    """Put what was set aside back into a state, whose memory a step may have moved."""
    if kept:
        pieces = state.pieces({name for _, name in kept})
        for (key, name), piece in kept.items():
            pieces[key][name].copy_(piece)
