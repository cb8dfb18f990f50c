"""The pipeline that every sparse method runs through: feed back, select, exchange, settle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.base import Codec
from micro.codecs.indices import IndexCodec, Int32
from micro.codecs.raw import Raw
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import Density
from micro.density.constant import Constant
from micro.exchanges.base import Exchange, Needs, Transport, Wire
from micro.exchanges.gather import Gather
from micro.exchanges.predicted_traffic import Choice
from micro.exchanges.union import Union
from micro.feedback import ErrorFeedback, Feedback
from micro.kernels.sums import Sums
from micro.parts import StatefulPart
from micro.predicted_traffic import Bucket, Volume
from micro.reducers.base import BucketState
from micro.reducers.outcome import Arrived, Outcome, arrived_at, cut_
from micro.reducers.rounding import write_sum_
from micro.reducers.stats import Start, stats_of
from micro.reducers.whole import Sent, send_all
from micro.reducers.with_density import WithDensity
from micro.selectors.base import Selector, Traits
from micro.selectors.everything import Everything
from micro.values.finite import FirstBad, index_of, is_finite_by
from micro.values.nonfinite import Finding, Policy, check_policy
from micro.values.sparse import AllValues, Exchanged, Overlap, SparseValues, Step, overflown


@dataclass(frozen=True, slots=True)
class SparseReducer(WithDensity):
    """Error feedback, selection, exchange: any sparse method as a composition of its parts.

    Args:
        selector: which indices.
        density: share of the vector to select, in (0, 1], or a policy of it.
        exchange: how indices and values meet; Union by default.
        codec: the form of the values on the wire; Raw by default.
        indices: the form of the indices on the wire; Int32 by default.
        feedback: what becomes of what was not sent; ErrorFeedback by default.
        nonfinite: 'stop' raises on all ranks when a gradient or the update holds NaN or Inf, 'skip' makes the update of
            that step zero.
        seed: for shared randomness.

    Raises:
        ValueError: a density outside (0, 1], or parts that do not go together.
    """

    selector: Selector[Any]
    density: Density[Any] | float
    exchange: Exchange[Any] = field(default_factory=Union)
    codec: Codec = field(default_factory=Raw)
    indices: IndexCodec = field(default_factory=Int32)
    feedback: Feedback = field(default_factory=ErrorFeedback)
    nonfinite: Policy = "stop"
    seed: int = 0
    name: ClassVar[str] = "sparse"

    def __post_init__(self) -> None:
        check_policy(self.nonfinite)
        check_together(self)
        _ = self.density_policy

    @property
    def rule_name(self) -> str | None:
        """Which published behaviours the parts follow, or None where there is only one."""
        parts = (self.selector, self.exchange, self.feedback, self.density_policy, self.codec)
        rules = [part.rule_name for part in parts]
        return "+".join(dict.fromkeys(rule for rule in rules if rule)) or None

    @property
    def method(self) -> str:
        """The selector's name, the exchange's where it is not the usual, and the rule where there are several."""
        usual = self.exchange.name in ("union", "gather")
        parts = [self.selector.full_name, *([] if usual else [self.exchange.full_name])]
        return " + ".join(parts) + (f" ({self.rule_name})" if self.rule_name else "")

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a model that the density policy does not fit; see Reducer."""
        self.density_policy.check_parameters(shapes)

    def prepare(self, comm: Comm, device: torch.device) -> None:
        """Compile what a step runs, before the first one: ranks that compile in it make the others wait."""
        kernels.prepare(device)

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart[Any]]:
        """Selector, exchange and density; see Reducer."""
        return {"selector": self.selector, "exchange": self.exchange, "density": self.density_policy}

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the sparse mean update."""
        start = Start.of(comm, grad.device)
        wanted = yield from self.density_policy.target(state.density, grad, state.step, state.layout, comm)
        target = self.selector.effective_target(wanted, state.layout)
        forgotten = self.feedback.forgotten(state.memory)
        at_work = self.at(target.density)
        acc, bad, sums, to_add = self._accumulate_(at_work, state, grad, comm.world_size)
        is_finite = is_finite_by(bad, grad.numel())
        step = Step(state.step, target.count, self.seed, state.layout, target.layer_densities, sums, is_finite)
        transport = Transport(comm=comm, step=step, overlap=at_work.selector.overlap, wire=self.wire)
        if at_work.sends_all:
            average_ = (self.exchange if isinstance(self.exchange, Gather) else Union()).average_
            sent = yield from send_all(state, self.feedback, acc, grad, transport, average_, to_add=to_add)
            record: Mapping[str, Any] = {
                "forgotten": None if forgotten is None else float(forgotten)
            }  # host sync: the record
            bad = sent.first_bad if bad is None else bad
        else:
            sent = yield from self._send(at_work, state, acc, grad, transport, forgotten)
            record = sent.record
        state.step += 1
        stats = stats_of(
            start,
            comm,
            grad.device,
            step=step.index,
            numel=grad.numel(),
            rule=self.rule_name,
            target_density=target.density,
            target_count=target.count,
            counts=sent.counts,
            global_count=sent.num_updated,
            **record,
        )

        def on_deliver() -> None:
            sent.on_deliver()
            self.selector.observe(state.selector, grad, step, sent.parts)

        findings = () if sent.is_finite else (Finding(state.layout, index_of(bad, grad.numel()), sent.in_update),)
        on_drop = partial(self.selector.observe, state.selector, grad, step, ())
        return Outcome(
            stats=stats,
            grad=grad,
            arrived=_arrived(sent.parts, grad),
            findings=findings,
            on_deliver=on_deliver,
            on_drop=on_drop,
        )

    def _accumulate_(
        self, at_work: "SparseReducer", state: BucketState, grad: Tensor, n: int
    ) -> tuple[Tensor, FirstBad, Sums | None, Tensor | None]:
        """Add the gradient to what was kept.

        Returns:
            the accumulator (numel,); where its first sum is that is not finite; its sums, where the selector wants
            them; the gradient, where a pass that encodes has still to add it.
        """
        if at_work.sends_all and not self.codec.lossless and grad.device.type == "cpu":
            acc = self.feedback.without_grad_(state.memory)
            if acc is not None:
                return acc, None, None, grad
        if Traits.WANTS_SUMS in at_work.selector.traits:
            return *self.feedback.accumulate_and_sum_(state.memory, grad, world_size=n), None
        return *self.feedback.accumulate_(state.memory, grad, world_size=n), None, None

    def _send(
        self,
        at_work: "SparseReducer",
        state: BucketState,
        acc: Tensor,
        grad: Tensor,
        transport: Transport,
        forgotten: Tensor | None,
    ) -> Reduction[Sent]:
        """Select and exchange with the parts of ``at_work``; make ``grad`` (numel,) the update."""
        comm, is_usual = transport.comm, at_work is self
        start = Start.of(comm, grad.device)
        state.spare = state.wire = None
        own = state.exchange if is_usual else at_work.exchange.start()
        chosen = state.selector if is_usual else at_work.selector.start()
        selection = yield from at_work.selector.select(chosen, acc, transport.step, comm)
        select = start.spans(comm, grad.device).rest
        exchanged = yield from at_work.exchange.exchange(own, acc, selection, transport)
        exchanged, overflow, lost = yield from overflown(exchanged.update, selection.scale, exchanged, forgotten)
        if overflow is not None:  # on all ranks alike: the update is the same bits everywhere
            cut_(acc, overflow, comm.world_size)
        on_deliver = yield from self._write_(state, grad, exchanged, selection.scale)
        record = {"threshold": selection.threshold, "select": select, "forgotten": lost}
        return Sent(
            counts=exchanged.counts,
            num_updated=int(exchanged.num_updated),
            is_finite=bool(exchanged.is_finite),
            in_update=None if overflow is None else int(overflow.min()),
            on_deliver=on_deliver,
            parts=exchanged.update,
            record=record | {"overfull": exchanged.overfull},
        )

    @property
    def wire(self) -> Wire:
        """The forms of values and indices."""
        return Wire(self.codec, self.indices)

    @property
    def sends_all(self) -> bool:
        """Whether every value travels, and all of them together: no index is made."""
        each_to_all = isinstance(self.exchange, Gather) and not self.codec.lossless
        return isinstance(self.selector, Everything) and (each_to_all or isinstance(self.exchange, Union))

    def at(self, density: float) -> "SparseReducer":
        """Return the composition at work at this density: at 1 all values travel, encoded as ever, and no index.

        Published behaviours, and selectors that follow no density, are at work as they are.
        """
        if density < 1.0:
            return self
        keeps = isinstance(self.selector, Everything) or Traits.OWN_DENSITY in self.selector.traits
        if keeps or "published" in (self.rule_name or ""):
            return self
        return replace(self, selector=Everything(), density=1.0, exchange=Union())

    def _write_(
        self, state: BucketState, grad: Tensor, exchanged: Exchanged, scale: float
    ) -> Reduction[Callable[[], None]]:
        """Write the update into ``grad``, if it is finite; return what then keeps what was not sent."""
        if not exchanged.is_finite:
            return lambda: None
        self.feedback.clear_(grad)
        unsent = yield from write_sum_(exchanged.update, grad, scale=scale)

        def on_deliver() -> None:
            self.feedback.settle_(state.memory, exchanged.sent, exchanged.update, scale)
            if unsent is not None:
                self.feedback.keep_(state.memory, unsent)

        return on_deliver

    def volume(self, bucket: Bucket) -> Volume:
        """Return what selector and exchange send, at the density in the end; see Reducer."""
        layout = bucket.named
        settled = self.density_policy.settled(layout)
        density, parts = settled.density, self.at(settled.density)
        choosing = parts.selector.volume(layout, density, bucket.world_size)
        if settled.layer_densities is not None and parts is self:  # not where all values travel
            choosing = replace(choosing, count=settled.count)
        k = parts.selector.effective_target(settled, layout).count
        choice = Choice.of(bucket, choosing, parts.selector.overlap, k, self.wire)
        calls, num_updated = parts.exchange.volume(choice)
        return bucket.volume((*choosing.calls, *calls), num_updated)

    def keep_(self, state: BucketState, unsent: SparseValues) -> None:
        """Keep what an update lost that was rounded after it was reduced, as the feedback does; see Reducer."""
        self.feedback.keep_(state.memory, unsent)


def _arrived(parts: Sequence[SparseValues] | None, grad: Tensor) -> Arrived | None:
    """Return what says where an update holds one of ``parts``; None where it may be anywhere."""
    if parts is None or any(isinstance(part, AllValues) for part in parts):
        return None
    return partial(arrived_at, [part.indices for part in parts], grad.numel(), grad.device)


def check_together(parts: SparseReducer) -> None:
    """Raise ValueError where the parts of a method do not go together, with the reason."""
    selector, exchange, overlap = parts.selector, parts.exchange, parts.selector.overlap
    if overlap not in exchange.accepts:
        why = _WHY_NOT[overlap].format(selector.full_name)
        raise ValueError(f"exchange {exchange.full_name} {why}: use exchange union")
    exchange.check_wire(parts.wire)
    if isinstance(selector, Everything) and parts.density_policy != Constant(1.0):
        raise ValueError(f"selector {selector.name} sends all values: set density=1, without a warm-up")
    if Traits.UNBIASED in selector.traits and parts.feedback.name != "none":
        raise ValueError("unbiased random-k scales its values, which error feedback would amplify: set feedback=none")
    needs, is_coded = exchange.needs, not parts.codec.lossless
    has_others = Needs.NO_MOMENTUM in needs or (Needs.NO_MOMENTUM_WITH_CODES in needs and is_coded)
    if parts.feedback.name == "momentum" and has_others:
        raise ValueError(
            f"feedback momentum clears it where a rank sends something, and what exchange {exchange.label} sends has "
            "entries that the rank did not choose: use exchange union or gather"
        )
    if parts.codec.diverges_with_feedback and parts.feedback.name != "none":
        raise ValueError(
            f"codec {parts.codec.name} as published makes residuals grow: set feedback=none or rule=repaired"
        )
    if parts.density_policy.by_layer and Traits.BY_PARAMETER not in selector.traits:
        raise ValueError(
            f"density {parts.density_policy.name} differs by layer, {selector.name} does not: use topk, scope=layer, "
            "or per_tensor"
        )
    if overlap is not Overlap.SAME:
        parts.indices.check_density(parts.density_policy.density)


_WHY_NOT = {
    Overlap.LEADER: "sends each rank's own choice, but with {} one rank chooses for all",
    Overlap.SAME: "sends each rank's own choice, but {} gives all ranks the same indices",
    Overlap.ANY: "needs index sets that no two ranks share, but with {} they may share some",
    Overlap.DISJOINT: "needs ranks that search the whole vector, but with {} each searches its own slice",
}
