"""The selector per_tensor: applies another selector to each parameter separately."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import Target, target_count
from micro.predicted_traffic import Choosing
from micro.selectors.base import Selector, Traits
from micro.selectors.wrapping import WrappingSelector
from micro.values.flat import Layout
from micro.values.randomness import seed_for
from micro.values.sparse import Selection, Step


@dataclass(slots=True)
class PerTensorState:
    """The inner selector's states, by parameter name."""

    by_name: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerTensor(WrappingSelector[PerTensorState]):
    """Select in each parameter separately, as if each were a bucket, with one exchange for all.

    In a whole bucket, parameters with large gradients use up all of k, depending on how parameters were merged into
    buckets. Here each parameter has its own k, floor(density * numel) and at least 1, its own random numbers, and its
    own state, which follows it into other buckets. One exchange sends the joint selection. On an accelerator the host
    waits once per parameter; ``TopK(scope="layer")`` waits once in all.

    Args:
        selector: selects within a parameter, without messages: a part, its name, or a mapping.

    Statistics: k is the sum over the parameters; a threshold is reported only if there is a single parameter.

    Source: selection layer by layer is that of Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887.

    Raises:
        ValueError: the selector sends messages, needs all parameters, already selects by parameter, or is unbiased.
    """

    name: ClassVar[str] = "per_tensor"
    state: ClassVar[type[PerTensorState]] = PerTensorState
    own_traits: ClassVar[Traits] = Traits.BY_PARAMETER | Traits.ALL_PARAMETERS

    @staticmethod
    def why_not(selector: Selector[Any]) -> str | None:
        """Return why a selector does not work within each parameter separately, or None if it does."""
        reasons = {
            Traits.BY_PARAMETER: "already selects in each parameter separately",
            Traits.ALL_PARAMETERS: "needs all parameters together",
            Traits.UNBIASED: "scales the update by one factor, which would differ between parameters",
        }
        if type(selector).observe is not Selector.observe:
            return "learns from the update of the whole vector"
        why = next((why for trait, why in reasons.items() if trait in selector.traits), None)
        sends = why is None and selector.volume(Layout.flat(1000), 0.01, 2).calls
        return "sends messages to select, which each parameter would repeat" if sends else why

    def save(self, state: PerTensorState) -> dict[str, Any]:
        """Return the selector's states by parameter name."""
        return {name: self.selector.save(inner) for name, inner in state.by_name.items()}

    def load(self, saved: dict[str, Any]) -> PerTensorState:
        """Return the state that ``save`` described."""
        return PerTensorState({name: self.selector.load(inner) for name, inner in saved.items()})

    def regroup(
        self, state: PerTensorState, old: Sequence[tuple[Layout, PerTensorState]], layout: Layout
    ) -> PerTensorState:
        """Return the states of the new bucket's parameters, from their old buckets."""
        known = {name: inner for _, kept in old for name, inner in kept.by_name.items()}
        return PerTensorState({name: known[name] for name in layout.names if name in known})

    def rescale_(self, state: PerTensorState, factor: float) -> None:
        """Rescale the states of all parameters; see StatefulPart."""
        for inner in state.by_name.values():
            self.selector.rescale_(inner, factor)

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return the policy's density for each parameter, and the sum of their counts."""
        densities = target.layer_densities or (target.density,) * len(layout.names)
        counts = (target_count(d, numel) for d, numel in zip(densities, layout.numels, strict=True) if numel)
        return Target(target.density, sum(counts), densities)

    def select(self, state: PerTensorState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the selections of all parameters as one."""
        densities = step.layer_densities or (step.target_count / acc.numel(),) * len(step.layout.names)
        starts, found = list[int](), list[Selection]()
        for density, (name, place), own in zip(
            densities, step.layout.slices(), step.layout.kept(_layouts), strict=True
        ):
            if own is None:
                continue
            if name not in state.by_name:
                state.by_name[name] = self.selector.start()
            inner = Step(step.index, target_count(density, own.numel), seed_for(step.seed, name), own)
            starts.append(place.start)
            found.append((yield from self.selector.select(state.by_name[name], acc[place], inner, comm)))
        counts = [selection.counts for selection in found if selection.counts is not None]
        return Selection(
            torch.cat([selection.indices + start for selection, start in zip(found, starts, strict=True)]),
            counts=tuple(map(sum, zip(*counts, strict=True))) if len(counts) == len(found) else None,
            threshold=found[0].threshold if len(found) == 1 else None,
        )

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return that selection sends nothing; see Selector."""
        return Choosing(knows_counts=self.selector.volume(layout, density, world_size).knows_counts)


def _layouts(layout: Layout) -> tuple[Layout | None, ...]:
    """Return each parameter's own layout; None for one without elements."""
    parameters = zip(layout.names, layout.shapes, layout.numels, strict=True)
    return tuple(Layout((name,), (shape,)) if numel else None for name, shape, numel in parameters)
