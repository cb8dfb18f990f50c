"""The base class of reducers that send the largest coefficients of a transform: FFT sparsification and DeMo."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from micro.codecs.indices import IndexCodec, Int32
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import Density, Target
from micro.feedback.base import Feedback
from micro.feedback.none import NoFeedback
from micro.parts import as_part
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome, checked, cut_
from micro.reducers.sparse import WithDensity
from micro.reducers.stats import Start, stats_of
from micro.values.finite import Finite, Policy, check_policy, is_finite_by
from micro.values.sparse import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The result of sending coefficients; the mean of all ranks is in the gradient.

    Attributes:
        counts: coefficients sent by each rank.
        num_updated: distinct coefficients sent by all ranks.
        is_finite: whether the gradients of all ranks were finite.
        select: seconds of transform and selection.
        error: () the relative error of what this rank sent of its accumulator.
        own: (numel,) what this rank sent, transformed back; None without feedback.
        unsent: (numel,) rounding error of the mean in the gradient's dtype.
        num_bins: see StepStats.
    """

    counts: tuple[int, ...]
    num_updated: int | Tensor
    is_finite: Finite
    select: float
    error: Tensor | None
    own: Tensor | None
    unsent: Tensor | None
    num_bins: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transforming(WithDensity):
    """Send the largest coefficients of the accumulator's transform; the update is dense. Subclasses have names.

    The transform is orthonormal, so ``relative_error`` is exact up to rounding. Counts and densities in the statistics
    refer to coefficients. Every rank does the inverse transform itself, so replicas are bitwise equal only if all ranks
    use the same library, kind of processor and number of threads.

    Args:
        density: share of the coefficients kept, in (0, 1], or a schedule of it.
        indices: codec of their indices.
        feedback: 'none', or 'residual', which keeps what was not sent.
        nonfinite: 'stop' raises on all ranks if a gradient has NaN or Inf, 'skip' makes that update zero.
        seed: for codecs with random rounding.

    Raises:
        ValueError: a density outside (0, 1] or by layer, or another feedback.
    """

    depends_on_threads: ClassVar[bool] = True
    density: Density[Any] | float
    feedback: Feedback = field(default_factory=NoFeedback)
    indices: IndexCodec = field(default_factory=Int32)
    nonfinite: Policy = "stop"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "feedback", as_part(Feedback, self.feedback))
        object.__setattr__(self, "indices", as_part(IndexCodec, self.indices))
        check_policy(self.nonfinite)
        if self.density_policy.by_layer:
            raise ValueError(
                f"density {self.density_policy.name} differs by layer, {self.name} takes one share of all: use another"
            )
        if self.feedback.name not in ("none", "residual"):
            raise ValueError(f"feedback of {self.name} must be one of none, residual, got '{self.feedback.name}'")

    @property
    def keeps(self) -> bool:
        """Whether what was not sent stays in the residual."""
        return self.feedback.name == "residual"

    @abstractmethod
    def send(self, acc: Tensor, grad: Tensor, target: Target, step: Step, comm: Comm) -> Reduction[Coefficients]:
        """Send the largest coefficients of ``acc`` (numel,), not modified, and set ``grad`` (numel,) to the mean."""

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean update."""
        start, numel = Start.of(comm, grad.device), grad.numel()
        target = yield from self.density_policy.target(state.density, grad, state.step, state.layout, comm)
        forgotten = self.feedback.forgotten(state.memory)
        acc, bad = self.feedback.accumulate_(state.memory, grad, world_size=comm.world_size)
        is_finite = is_finite_by(bad, numel)
        step = Step(state.step, target.count, self.seed, state.layout, is_finite=is_finite)
        sent = yield from self.send(acc, grad, target, step, comm)
        state.step += 1
        made = yield from checked(grad, sent.error, forgotten, is_finite=sent.is_finite, num_updated=sent.num_updated)
        if made.bad_update is not None:
            cut_(acc, slice(None), comm.world_size * numel)
        relative_error, lost = made.records
        stats = stats_of(
            start,
            comm,
            grad.device,
            step=step.index,
            numel=numel,
            rule=self.rule_name,
            target_density=target.density,
            target_count=sent.counts[comm.rank],
            counts=sent.counts,
            global_count=made.num_updated,
            select=sent.select,
            forgotten=lost,
            relative_error=relative_error,
            num_bins=sent.num_bins,
        )

        def on_deliver() -> None:
            for vector, sign in ((sent.own, -1), (sent.unsent, 1)):
                if vector is not None and self.keeps:
                    acc.add_(vector, alpha=sign)

        findings = made.findings(state.layout, bad)
        return Outcome(stats=stats, grad=grad, findings=findings, on_deliver=on_deliver)
