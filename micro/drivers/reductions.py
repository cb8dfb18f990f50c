"""The vectors of one step on their way: begun one after the other, decided together, and put back."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from micro.drivers.bucket_states import BucketStates
from micro.drivers.loss_scale import LossScale, common_scale
from micro.drivers.set_aside import SetAside
from micro.flat import Layout
from micro.group_comm import GroupComm
from micro.nonfinite import Finding, NonFiniteGradient
from micro.reducers.base import BucketState, Reducer
from micro.reducers.outcome import Outcome
from micro.requests import AllGather
from micro.rounds import UnderWay
from micro.scope import joined
from micro.spans import Seconds
from micro.stats import StepStats


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
class Running:
    """A reduction that was begun.

    Attributes:
        begun: the reduction, which waits for its end.
        vectors: those that ``grad`` (numel,) holds one after the other.
        set_aside: what is kept for unused parameters.
    """

    begun: UnderWay[Outcome]
    vectors: Sequence[Vector]
    grad: Tensor
    set_aside: SetAside

    def put_back(self) -> None:
        """Make what is in ``grad`` the gradients of the model."""
        if self.grad is not self.vectors[0].grad:
            sizes = [vector.layout.numel for vector in self.vectors]
            for vector, piece in zip(self.vectors, self.grad.split(sizes), strict=True):
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

    Attributes:
        stats: of the last step, one per reduction, in the order in which they were begun.
        bucket_names: the parameters of each vector, in the same order.
        skipped: whether the last step was dropped; the same on all ranks.
        exposed: seconds of the last backward after all gradients were computed: the communication it did not hide.
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
    ) -> None:
        self.stats: list[StepStats] = []
        self.bucket_names: list[tuple[str, ...]] = []
        self.skipped = False
        self.exposed: Seconds = 0.0
        self.whole_model = whole_model
        self._reducer, self._states, self._comm = reducer, states, comm
        self._device, self._loss_scale = device, loss_scale
        self._has_counts = False
        self._running: list[Running] = []
        self._finished: list[tuple[Running, Outcome]] = []

    def forget_step(self) -> None:
        """Forget the statistics of the step before."""
        self.stats.clear()
        self.bucket_names.clear()
        self.skipped = self._has_counts = False

    def begin(self, *, has_inputs: bool = True, counts_inputs: bool = False) -> float:
        """Begin a step; all ranks call this. Return the factor by which its gradients are to be multiplied.

        Args:
            has_inputs: whether this rank has inputs.
            counts_inputs: whether the mean is over the ranks that have some; the same on all ranks.

        Raises:
            ValueError: ranks have different scales of the loss.
        """
        if not counts_inputs and not self._loss_scale.is_used:
            return 1.0
        active = self._active_scales(has_inputs)
        factor = self._loss_scale.follow(common_scale(active))
        if factor != 1:
            self._states.rescale_(factor)
        return self._comm.world_size / len(active) if counts_inputs else 1.0

    def _active_scales(self, has_inputs: bool) -> dict[int, float]:
        """Return the scale of each rank that has inputs, by one message of 16 bytes a rank and step.

        A rank that is out of inputs in a join context takes the scale of the others, which its own scaler lacks.
        """
        self.begin_counts()
        mine = torch.tensor([has_inputs, self._loss_scale.current], dtype=torch.float64, device=self._device)
        rows = self._comm.answer(AllGather(mine=mine)).tolist()  # host sync: once a step, with a scaler or such a join
        ranks = dist.get_process_group_ranks(self._comm.group)
        return {rank: scale for rank, (is_active, scale) in zip(ranks, rows, strict=True) if is_active}

    def begin_counts(self) -> None:
        """Begin to count what is sent; all until the first reduction is begun is counted with it."""
        if not self._has_counts:
            self._comm.begin_step()
            self._has_counts = True

    def launch(self, vectors: Sequence[Vector], unused: Callable[[BucketState], Collection[str]]) -> None:
        """Begin to reduce neighbouring vectors as one; all ranks begin the same ones in the same order.

        Args:
            unused: returns the parameters that no rank has used, for which what is kept waits.
        """
        reducer, layout = joined(self._reducer, [vector.layout for vector in vectors])
        grad = vectors[0].grad if len(vectors) == 1 else torch.cat([vector.grad for vector in vectors])
        state = self._states.of(layout, grad.dtype, grad.device)
        self.bucket_names += [vector.layout.names for vector in vectors]
        self.begin_counts()
        self._has_counts = False
        set_aside = SetAside(state, unused(state))
        self._running.append(Running(reducer.begin(state, grad, self._comm), vectors, grad, set_aside))

    @property
    def can_finish(self) -> bool:
        """Whether the first reduction has ended and is not the last that was begun; the same on all ranks."""
        return len(self._running) > 1 and self._running[0].begun.is_done

    def finish_first(self) -> None:
        """Wait for the end of the first reduction."""
        self._finished.append((self._running[0], self._running[0].begun()))
        del self._running[0]

    def finish_all(self) -> None:
        """Wait for the ends of all reductions."""
        while self._running:
            self.finish_first()

    @property
    def findings(self) -> list[Finding]:
        """What was not finite in the reductions that have ended."""
        return [finding for _, outcome in self._finished for finding in outcome.findings]

    def decide(
        self, *, is_bad: bool, error_of: Callable[[list[Finding]], NonFiniteGradient]
    ) -> NonFiniteGradient | None:
        """Deliver all reductions, or drop all of them; return the error to raise, if any. Vectors wait for `put_back`.

        A scaler looks for Inf in the gradients, to lower the scale and to leave out the optimizer's step: there the
        update of a step that is dropped is Inf everywhere, and it is no error.

        Args:
            is_bad: whether anything was not finite, the same on all ranks.
            error_of: makes the error; all ranks call it.
        """
        findings, scales = self.findings, self._loss_scale.is_used
        self.stats += [outcome.drop() if is_bad else outcome.deliver() for _, outcome in self._finished]
        self.skipped = is_bad
        for running, _ in self._finished:
            running.set_aside.restore()
            if is_bad and scales:
                running.grad.fill_(torch.inf)
        return error_of(findings) if is_bad and not scales and self._reducer.policy == "stop" else None

    def put_back(self) -> None:
        """Put back the vectors of a step that is decided."""
        finished, self._finished = self._finished, []
        for running, _ in finished:
            running.put_back()

    def abandon(self) -> list[Vector]:
        """Give up what has not been decided; return its vectors."""
        given_up = [*(running for running, _ in self._finished), *self._running]
        self._finished.clear()
        self._running.clear()
        return [vector for running in given_up for vector in running.vectors]
