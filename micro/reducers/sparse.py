"""The reducer of all sparse methods, a pipeline: add the residual, select, exchange, update the residual."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.codecs.base import Codec
from micro.codecs.indices import IndexCodec, Int32
from micro.codecs.raw import Raw
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import Constant, Density
from micro.exchanges.base import Exchange, Transport, Wire
from micro.exchanges.predicted_traffic import Choice
from micro.exchanges.union import Union
from micro.feedback.base import Feedback
from micro.feedback.residual import ErrorFeedback
from micro.kernels import preparing
from micro.kernels.sums import Sums
from micro.parts import StatefulPart
from micro.predicted_traffic import Bucket, Volume
from micro.reducers.base import BucketState, Reducer
from micro.reducers.outcome import Outcome, arrived_at, checked_sum, cut_, write_sum_
from micro.reducers.quantized import Quantized
from micro.reducers.stats import Start, stats_of
from micro.reducers.together import check_together
from micro.selectors.base import Selector, Traits
from micro.values.finite import FirstBad, Policy, check_policy, is_finite_by
from micro.values.flat import Layout
from micro.values.sparse import Exchanged, SparseValues, Step


class WithDensity(Reducer):
    """A reducer with a density, in (0, 1], or a policy of it, and a feedback."""

    density: Density[Any] | float
    feedback: Feedback

    @cached_property
    def density_policy(self) -> Density[Any]:
        """The density as a policy."""
        return self.density if isinstance(self.density, Density) else Constant(self.density)

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart[Any]]:
        """The density; see Reducer."""
        return {"density": self.density_policy}

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state with nothing kept."""
        memory = self.feedback.start(layout.numel, dtype, device)
        return BucketState(layout, 0, memory, **{name: part.start() for name, part in self.stateful_parts.items()})


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
        check_together(self.selector, self.density_policy, self.exchange, self.wire, self.feedback)

    @cached_property
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

    @cached_property
    def wire(self) -> Wire:
        """The forms of values and indices."""
        return Wire(self.codec, self.indices)

    @cached_property
    def whole(self) -> Quantized | None:
        """The reducer of steps at a density of 1, in which all values travel and no index; None: they are as others.

        So it is for published behaviours, and for selectors that follow no density.
        """
        traits = self.selector.traits
        keeps = Traits.OWN_DENSITY in traits or "published" in (self.rule_name or "")
        if keeps and Traits.EVERY_INDEX not in traits:
            return None
        to_all = self.exchange.sends_to_all and not self.codec.lossless
        return Quantized(self.codec, to_all, self.feedback, self.nonfinite, self.seed)

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a model that the density policy does not fit; see Reducer."""
        self.density_policy.check_parameters(shapes)

    def prepare(self, comm: Comm, device: torch.device) -> None:
        """Compile what a step runs, before the first one: ranks that compile in it make the others wait."""
        preparing.prepare(device)

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart[Any]]:
        """Selector, exchange and density; see Reducer."""
        return {"selector": self.selector, "exchange": self.exchange, "density": self.density_policy}

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the sparse mean update."""
        start, layout, device = Start.of(comm, grad.device), state.layout, grad.device
        wanted = yield from self.density_policy.target(state.density, grad, state.step, layout, comm)
        target = self.selector.effective_target(wanted, layout)
        if target.density == 1 and self.whole is not None:
            learn = partial(self.selector.observe, state.selector)
            return (yield from self.whole.mean(state, grad, comm, rule=self.rule_name, observe=learn))
        state.spare = state.wire = None  # of steps at a density of 1
        forgotten = self.feedback.forgotten(state.memory)
        acc, bad, sums = self._accumulate_(state, grad, comm.world_size)
        is_finite = is_finite_by(bad, grad.numel())
        step = Step(state.step, target.count, self.seed, layout, target.layer_densities, sums, is_finite)
        before = comm.now(device)
        selection = yield from self.selector.select(state.selector, acc, step, comm)
        select = comm.now(device) - before
        transport = Transport(comm=comm, step=step, overlap=self.selector.overlap, wire=self.wire)
        sent = yield from self.exchange.exchange(state.exchange, acc, selection, transport)
        made = yield from checked_sum(sent, selection.scale, forgotten)
        if made.overflow is not None:  # on all ranks alike: the update is the same bits everywhere
            cut_(acc, made.overflow, comm.world_size)
        findings = made.findings(layout, bad)
        unsent = None
        if not findings:
            self.feedback.clear_(grad)
            unsent = yield from write_sum_(sent.update, grad, scale=selection.scale)
        state.step += 1
        aims: dict[str, Any] = {
            "target_density": target.density,
            "target_count": target.count,
            "threshold": selection.threshold,
        }
        found: dict[str, Any] = {"counts": sent.counts, "global_count": made.num_updated, "overfull": sent.overfull}
        about: dict[str, Any] = {"step": step.index, "numel": grad.numel(), "rule": self.rule_name, "select": select}
        stats = stats_of(start, comm, device, forgotten=made.records[0], **about, **aims, **found)
        return Outcome(
            stats=stats,
            grad=grad,
            arrived=partial(arrived_at, [part.indices for part in sent.update], grad.numel(), device),
            findings=findings,
            on_deliver=partial(self._deliver, state, grad, step, selection.scale, sent, unsent),
            on_drop=partial(self.selector.observe, state.selector, grad, step, ()),
        )

    def _accumulate_(self, state: BucketState, grad: Tensor, n: int) -> tuple[Tensor, FirstBad, Sums | None]:
        """Add the gradient to what was kept; return what `Feedback.accumulate_` does, and the sums that are wanted."""
        if Traits.WANTS_SUMS in self.selector.traits:
            return self.feedback.accumulate_and_sum_(state.memory, grad, world_size=n)
        return *self.feedback.accumulate_(state.memory, grad, world_size=n), None

    def _deliver(
        self, state: BucketState, grad: Tensor, step: Step, scale: float, sent: Exchanged, unsent: SparseValues | None
    ) -> None:
        """Keep what was not sent, and what rounding left out."""
        self.feedback.settle_(state.memory, sent.sent, sent.update, scale)
        if unsent is not None:
            self.keep_(state, unsent)
        self.selector.observe(state.selector, grad, step, sent.update)

    def volume(self, bucket: Bucket) -> Volume:
        """Return what selector and exchange send, at the density in the end; see Reducer."""
        layout = bucket.named
        settled = self.density_policy.settled(layout)
        if settled.density == 1 and self.whole is not None:
            return self.whole.volume(bucket)
        choosing = self.selector.volume(layout, settled.density, bucket.world_size)
        if settled.layer_densities is not None:
            choosing = replace(choosing, count=settled.count)
        k = self.selector.effective_target(settled, layout).count
        calls, num_updated = self.exchange.volume(Choice.of(bucket, choosing, self.selector.overlap, k, self.wire))
        return bucket.volume((*choosing.calls, *calls), num_updated)
