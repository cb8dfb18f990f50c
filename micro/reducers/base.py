"""The base class of reducers, which turn the gradients of all ranks into one mean update."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import retired
from micro.comm.group import GroupComm
from micro.comm.loop import all_together, carried_out
from micro.comm.peers import first_line
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.feedback.base import Memory
from micro.parts import NoState, Part, StatefulPart
from micro.predicted_traffic import Bucket, Volume
from micro.reducers.outcome import Latest, Outcome, arrived_at
from micro.reducers.stats import StepStats
from micro.selectors.base import Selector
from micro.values.finite import Policy
from micro.values.flat import Layout, regroup
from micro.values.nonfinite import NonFiniteGradient, report
from micro.values.sparse import SparseValues


@dataclass(slots=True)
class BucketState:
    """What a reducer remembers of one bucket.

    Attributes:
        layout: names and shapes of its parameters.
        step: steps done.
        memory: vectors (numel,) by name, or empty: the residual, and what else a feedback keeps for each parameter.
        selector, exchange, density: the parts' own states.
        factors: matrices by parameter name, where a method approximates with them.
        spare: (numel,) memory for the next message, while all values travel, or for copies of matrices; not saved.
        wire: bytes for the messages of such steps, where values are encoded; not saved.
        latest: where the last step sent something. Not saved.
        broken_by: what ended a step in its middle, in one line; None while every step is whole.
    """

    layout: Layout
    step: int
    memory: Memory
    selector: Any = field(default_factory=NoState)
    exchange: Any = field(default_factory=NoState)
    density: Any = field(default_factory=NoState)
    factors: dict[str, Tensor] = field(default_factory=dict)
    spare: Tensor | None = None
    wire: Tensor | None = None
    latest: Latest = field(default_factory=Latest)
    broken_by: str | None = None

    def break_off(self, error: BaseException) -> None:
        """Note that ``error`` ended a step in its middle: ranks may differ in how much of it they have done.

        A NonFiniteGradient does not: all ranks raise it, after the step was taken back.
        """
        if self.broken_by is None and not isinstance(error, NonFiniteGradient):
            self.broken_by = first_line(error)

    def check_whole(self) -> None:
        """Raise RuntimeError where a step was ended in its middle: the state can neither go on nor be saved."""
        if self.broken_by is not None:
            raise RuntimeError(
                f"step {self.step} broke off ({self.broken_by}), and ranks may have done different parts of it: "
                "load a state that was saved before, or start a new one"
            )

    @property
    def residual(self) -> Tensor:
        """What was not sent (numel,), or empty where nothing is kept."""
        return self.vector("residual")

    def vector(self, key: str) -> Tensor:
        """Return what is kept under ``key`` (numel,) in the layout's order, or empty."""
        return self.memory[key]

    def pieces(self, names: Set[str] | None = None) -> dict[str, dict[str, Tensor]]:
        """Return views of what is kept, by key and by parameter name, of ``names`` alone where they are given.

        There is nothing under a key whose vector is empty. The bucket's next step may move the vectors' memory: take
        new views after it.
        """
        places = [(name, place) for name, place in self.layout.slices() if names is None or name in names]
        kept = {key: vector for key, vector in self.memory.items() if vector.numel()}
        return {key: {name: vector[place] for name, place in places} for key, vector in kept.items()}


def prepare(reducer: "Reducer", comm: GroupComm, device: torch.device) -> None:
    """Have ``reducer`` make what it needs of the ranks; close ``comm`` and raise where they do not fit it, on all."""
    try:
        reducer.prepare(comm, device)
    except ValueError:
        comm.close()
        raise


def saved_layout(saved: dict[str, Any]) -> Layout:
    """Return the layout of a saved bucket."""
    return Layout(tuple(saved["shapes"]), tuple(tuple(shape) for shape in saved["shapes"].values()))


class Reducer(Part, ABC):
    """Turns the gradients of all ranks into their mean, or into a sparse approximation of it.

    One object serves any number of buckets; what changes from step to step is in the bucket's state.
    """

    kind: ClassVar[str] = "reducer"
    home: ClassVar[str] = "micro.reducers"
    group: ClassVar[str] = "micro.reducers"
    is_one_sum: ClassVar[bool] = False  # whether a bucket is one sum and nothing else, as without a hook
    depends_on_threads: ClassVar[bool] = False  # whether its update has other bits with another number of threads

    @property
    def shares_rounds(self) -> bool:
        """Whether all ranks call the same collectives for a bucket, so that buckets can share rounds (micro.comm)."""
        return True

    @property
    def method(self) -> str:
        """What a saved state is checked against: the method and its rule."""
        return f"{self.name} ({self.rule_name})" if self.rule_name else self.name

    @property
    def policy(self) -> Policy:
        """What to do about a step in which a gradient or the update is not finite: the setting ``nonfinite``."""
        policy: Policy = getattr(self, "nonfinite", "stop")
        return policy

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart[Any]]:
        """The parts of whose states a bucket has one each, by its name in BucketState."""
        return {}

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a model whose trained parameters, by name, the settings do not fit; here none is refused.

        Raises:
            ValueError: a setting names parameters that the model does not have.
        """

    def prepare(self, comm: Comm, device: torch.device) -> None:
        """Make what the reducer needs of the ranks; called once by all of them before the first step. Here nothing.

        Args:
            device: of the gradients.

        Raises:
            ValueError: these ranks do not fit the settings.
        """

    def volume(self, bucket: Bucket) -> Volume:
        """Return the collectives that a step in steady state calls for this bucket.

        Raises:
            ValueError: the reducer, or a part of it, does not say; or it needs a layout.
        """
        raise ValueError(f"what reducer {self.name} sends is not known: give it a method volume")

    @abstractmethod
    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state of a bucket before its first step."""

    @abstractmethod
    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) of this rank by the mean update, the same bits on all ranks.

        The residual becomes the accumulator, without NaN and Inf; what is sent leaves it when the outcome is delivered.
        The caller calls ``comm.begin_step()`` before.

        Returns:
            the outcome, to be delivered or dropped with those of the other buckets of the step. The parts' own states
            (thresholds, boundaries, densities) and the number of the step follow in either case: a step that is dropped
            counts as a step, on all ranks alike.
        """

    def reduce_(self, state: BucketState, grad: Tensor, comm: Comm) -> StepStats:
        """Replace ``grad`` (numel,) of this rank by the mean update, the same bits on all ranks.

        The caller calls ``comm.begin_step()`` before, once per step.

        Raises:
            NonFiniteGradient: on all ranks, when any gradient, or the update, held NaN or Inf and the policy is to
                stop. The policy 'skip' makes the update zero. Either way what is finite stays in the residuals, NaN and
                Inf are dropped.
            RuntimeError: an error ended an earlier step in its middle; see BucketState.check_whole. Every other error,
                of this rank or of one that it waits for, does that.
        """
        return carried_out(self.step(state, grad, comm), comm)

    def step(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[StepStats]:
        """Do what `reduce_` does, as a reduction."""
        state.check_whole()
        try:
            outcome = yield from self.reduction(state, grad, comm)
            (stats,) = yield from deliver_or_drop([outcome], self.policy)
        except BaseException as error:
            state.break_off(error)
            raise
        state.latest.arrived = partial(arrived_at, (), grad.numel(), grad.device) if stats.skipped else outcome.arrived
        return stats

    def reduce_buckets_(
        self, states: Sequence[BucketState], grads: Sequence[Tensor], comm: Comm
    ) -> tuple[StepStats, ...]:
        """Replace every bucket's gradient by its mean update, and let the step count for all of them or for none.

        Args:
            states: one per bucket, in the same order on all ranks.
            grads: of these buckets.

        Raises:
            NonFiniteGradient, RuntimeError: see reduce_.
        """

        def each_counted() -> Iterator[Comm]:
            while True:
                comm.begin_step()
                yield comm

        buckets = [partial(self.reduction, state, grad) for state, grad in zip(states, grads, strict=True)]
        for state in states:
            state.check_whole()
        try:
            outcomes = all_together(buckets, each_counted(), shares=self.shares_rounds)
            return carried_out(deliver_or_drop(outcomes, self.policy), comm)
        except BaseException as error:
            for state in states:
                state.break_off(error)
            raise

    def keep_(self, state: BucketState, unsent: SparseValues) -> None:
        """Keep ``unsent``, the same on all ranks: what an update lost that was rounded after it was reduced.

        Where the reducer keeps nothing of an element, it is lost.
        """
        if state.residual.numel():
            unsent.add_to_(state.residual)

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the state as plain data and tensors, what is kept for each parameter by its name.

        Raises:
            RuntimeError: an error ended a step in its middle; see BucketState.check_whole.
        """
        state.check_whole()
        return {
            "method": self.method,
            "step": state.step,
            "memory": {
                key: {name: piece.clone() for name, piece in pieces.items()} for key, pieces in state.pieces().items()
            },
            "shapes": dict(zip(state.layout.names, state.layout.shapes, strict=True)),
            **({"factors": {name: factor.clone() for name, factor in state.factors.items()}} if state.factors else {}),
            **{name: part.save(getattr(state, name)) for name, part in self.stateful_parts.items()},
        }

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state that ``save`` described.

        Where ``saved`` has no states of parts, as after micro.average, they start empty.

        Raises:
            ValueError: it is the state of another method, or of another feedback.
        """
        self.check_method(saved)
        state = self.start(saved_layout(saved), dtype, device)
        kept = sorted(key for key, vector in state.memory.items() if vector.numel())
        if kept != sorted(saved["memory"]):
            given, own = (" and ".join(keys) or "nothing" for keys in (sorted(saved["memory"]), kept))
            raise ValueError(f"state keeps {given} for each parameter, the reducer {own}: use the method that saved it")
        state.step = saved["step"]
        self._fill_(state, saved["memory"])
        state.factors |= {name: factor.to(device) for name, factor in saved.get("factors", {}).items()}
        for name, part in self.stateful_parts.items():
            if name in saved:
                setattr(state, name, part.load(saved[name]))
        return state

    def check_method(self, saved: dict[str, Any]) -> None:
        """Raise ValueError where a saved bucket is of another method."""
        if saved["method"] != self.method:
            other = f"state is of {saved['method']}, the reducer is {self.method}: load it into its own kind"
            raise ValueError(retired.refusal_of_state(saved["method"]) or other)

    def rebuild(
        self, layout: Layout, old: Sequence[BucketState], dtype: torch.dtype, device: torch.device
    ) -> BucketState:
        """Return the state of a new bucket whose parameters lay in the buckets ``old`` before; those are used up.

        Residuals follow their parameters. The states of parts are taken over where the new bucket holds the same
        parameters as one old bucket, in whatever order; otherwise they are new, except for what they keep by parameter.
        """
        state = self.start(layout, dtype, device)
        state.step = max((bucket.step for bucket in old), default=0)
        pieces: dict[str, dict[str, Tensor]] = {key: {} for key in state.memory}
        for bucket in old:
            for key, kept in bucket.pieces(set(layout.names)).items():
                pieces[key] |= kept
            state.factors |= {name: factor for name, factor in bucket.factors.items() if name in state.factors}
        self._fill_(state, pieces)
        for name, part in self.stateful_parts.items():
            states = [(bucket.layout, getattr(bucket, name)) for bucket in old]
            same = [kept for former, kept in states if set(former.names) == set(layout.names)]
            own = same[-1] if same else getattr(state, name)
            setattr(state, name, part.regroup(own, states, layout))
        return state

    def rescale_(self, state: BucketState, factor: float) -> None:
        """Multiply what a bucket keeps in units of gradients by ``factor``, because gradients are from now on.

        It is exact for a power of two. Thresholds are not changed: methods find them again.
        """
        for vector in state.memory.values():
            vector.mul_(factor)
        for name, part in self.stateful_parts.items():
            part.rescale_(getattr(state, name), factor)

    @staticmethod
    def _fill_(state: BucketState, pieces: dict[str, dict[str, Tensor]]) -> None:
        for key, vector in state.memory.items():
            if vector.numel() and key in pieces:
                state.memory[key] = regroup(pieces[key], state.layout, dtype=vector.dtype, device=vector.device)


def check_reducer(reducer: object) -> Reducer:
    """Return the reducer, or raise ValueError where it is none."""
    if isinstance(reducer, Reducer):
        return reducer
    given = f"the selector {type(reducer).__name__}" if isinstance(reducer, Selector) else repr(reducer)
    raise ValueError(
        f"reducer must be a micro.Reducer, got {given}: build one, as in "
        "micro.SparseReducer(micro.Micro(), density=0.01)"
    )


def deliver_or_drop(outcomes: Sequence[Outcome], policy: Policy) -> Reduction[tuple[StepStats, ...]]:
    """Deliver all buckets of a step, or drop all of them where one is not finite; return their statistics.

    Whether a bucket is finite travelled with its own exchange, so that all ranks know it of all buckets and decide
    alike without a collective. Only an error costs one, which gathers where each rank's first NaN or Inf is.

    Args:
        outcomes: the buckets of one step, in the same order on all ranks.

    Raises:
        NonFiniteGradient: the step was dropped, and the policy is to stop.
    """
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    stats = tuple(outcome.drop() if findings else outcome.deliver() for outcome in outcomes)
    if findings and policy == "stop":
        raise (yield from report(findings, stats[0].step, outcomes[0].grad.device))
    return stats
