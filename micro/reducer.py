"""From n gradients to one mean update: the pipeline that every sparse method runs through, and the dense mean."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from micro.codecs import Codec, Raw
from micro.comm import Comm, GroupComm, Traffic
from micro.density import Constant, Density, target_count
from micro.exchanges.base import Exchange
from micro.exchanges.union import Union
from micro.feedback import ErrorFeedback, Feedback
from micro.flat import Layout, regroup
from micro.health import Policy, check_policy, mean_not_finite, report
from micro.kernels.reference import first_nonfinite
from micro.selectors.base import Selector, Step
from micro.sparse import Exchanged
from micro.stats import StepStats, traffic_fields


@dataclass(slots=True)
class BucketState:
    """What a reducer remembers of one bucket: layout, steps done, residual (numel,), the selector's state."""

    layout: Layout
    step: int
    residual: Tensor
    selector: Any


def saved_layout(saved: dict[str, Any]) -> Layout:
    """Return the layout of a saved bucket."""
    return Layout(tuple(saved["shapes"]), tuple(tuple(shape) for shape in saved["shapes"].values()))


class Reducer(ABC):
    """Turns the gradients of all ranks into their mean, or into a sparse stand-in for it.

    One object serves any number of buckets; what changes from step to step is in the bucket's state.
    """

    @property
    @abstractmethod
    def method(self) -> str:
        """What a saved state is checked against: the selector and its rule, or dense."""

    @abstractmethod
    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state of a bucket before its first step."""

    @abstractmethod
    def reduce_(self, state: BucketState, grad: Tensor, comm: Comm) -> StepStats:
        """Replace ``grad`` (numel,) of this rank by the mean update, the same bits on all ranks.

        The caller calls ``comm.begin_step()`` before, once per step.

        Raises:
            NonFiniteGradient: on all ranks, when any gradient held NaN or Inf and the policy is to stop. The policy
                'skip' makes the update zero; what is finite waits in the residuals, NaN and Inf are dropped.
        """

    def launch(self, state: BucketState, grad: Tensor, comm: GroupComm) -> Callable[[], StepStats]:
        """Start to reduce a bucket of DDP; the call of what is returned ends it. Here: all at once.

        Every rank launches its buckets in the same order and then ends them in that order.
        """
        stats = self.reduce_(state, grad, comm)
        return lambda: stats

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the state as plain data and tensors, the residual by parameter name."""
        residual = {name: piece.clone() for name, piece in state.layout.split(state.residual).items()}
        return {
            "method": self.method,
            "step": state.step,
            "residual": residual,
            "shapes": dict(zip(state.layout.names, state.layout.shapes, strict=True)),
            "selector": None,
        }

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state that ``save`` described.

        Raises:
            ValueError: it is another method's.
        """
        if saved["method"] != self.method:
            raise ValueError(f"state is of {saved['method']}, the reducer is {self.method}: load it into its own kind")
        state = self.start(saved_layout(saved), dtype, device)
        state.step = saved["step"]
        if state.residual.numel():
            state.residual = regroup(saved["residual"], state.layout, dtype=state.residual.dtype, device=device)
        return state

    def rebuild(
        self, layout: Layout, old: Sequence[BucketState], dtype: torch.dtype, device: torch.device
    ) -> BucketState:
        """Return the state of a new bucket whose parameters lay in the buckets ``old`` before; those are used up.

        Residuals follow their parameters. The selector's state is taken over where the new bucket holds the same
        parameters as one old bucket, in whatever order; otherwise it starts anew.
        """
        state = self.start(layout, dtype, device)
        state.step = max((bucket.step for bucket in old), default=0)
        if state.residual.numel():
            pieces = {name: piece for bucket in old for name, piece in bucket.layout.split(bucket.residual).items()}
            state.residual = regroup(pieces, layout, dtype=state.residual.dtype, device=device)
        for bucket in old:
            if set(bucket.layout.names) == set(layout.names):
                state.selector = bucket.selector
        return state


@dataclass(frozen=True, slots=True)
class SparseReducer(Reducer):
    """Error feedback, selection, exchange: any sparse method as a composition of its parts.

    Args:
        selector: which indices.
        density: share of the vector asked for, in (0, 1], or a schedule of it.
        exchange: how indices and values meet; Union by default.
        codec: the form of the values on the wire; Raw by default.
        feedback: what becomes of what was not sent; ErrorFeedback by default.
        nonfinite: 'stop' raises on all ranks when a gradient holds NaN or Inf, 'skip' makes that update zero.
        seed: for shared randomness.

    Raises:
        ValueError: a density outside (0, 1], or parts that do not go together.
    """

    selector: Selector[Any]
    density: Density | float
    exchange: Exchange = field(default_factory=Union)
    codec: Codec = field(default_factory=Raw)
    feedback: Feedback = field(default_factory=ErrorFeedback)
    nonfinite: Policy = "stop"
    seed: int = 0

    def __post_init__(self) -> None:
        check_policy(self.nonfinite)
        if self.selector.overlap not in self.exchange.accepts:
            raise ValueError(
                f"exchange {self.exchange.name} sends each rank's own pairs, "
                f"but {self.selector.name} gives all ranks the same indices: use union"
            )
        if getattr(self.selector, "unbiased", False) and self.feedback.name != "none":
            raise ValueError(
                "unbiased random-k scales its values, which error feedback would amplify: set feedback=none"
            )
        _ = self.schedule

    @property
    def method(self) -> str:
        """The selector's name, and its rule where there are several."""
        rule = self.selector.rule_name
        return f"{self.selector.name} ({rule})" if rule else self.selector.name

    @property
    def schedule(self) -> Density:
        """The density as a schedule."""
        return Constant(self.density) if isinstance(self.density, int | float) else self.density

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state with nothing kept."""
        return BucketState(layout, 0, self.feedback.start(layout.numel, dtype, device), self.selector.start())

    def reduce_(self, state: BucketState, grad: Tensor, comm: Comm) -> StepStats:
        """Replace ``grad`` (numel,) by the sparse mean update; see Reducer."""
        started = comm.now(grad.device)
        waited = comm.traffic.elapsed_s
        density = self.schedule.at(state.step)
        step = Step(state.step, target_count(density, grad.numel()), self.seed)
        acc, bad = self.feedback.accumulate_(state.residual, grad)
        before = comm.now(grad.device), comm.traffic.elapsed_s
        selection = self.selector.select(state.selector, acc, step, comm)
        select_s = comm.now(grad.device) - before[0] - (comm.traffic.elapsed_s - before[1])
        exchanged = self.exchange.exchange(acc, selection, self.selector.overlap, self.codec, comm, healthy=bad is None)
        state.step += 1
        self._apply_(acc, grad, exchanged, selection.scale)
        if not exchanged.healthy and self.nonfinite == "stop":
            raise report(bad, state.layout, step.index, comm, grad.device)
        exchange_s = comm.traffic.elapsed_s - waited
        return StepStats(
            step=step.index,
            numel=grad.numel(),
            rule=self.selector.rule_name,
            target_density=density,
            target_count=step.target_count,
            counts=exchanged.counts,
            local_count=exchanged.counts[comm.rank],
            global_count=exchanged.num_updated if exchanged.healthy else 0,
            threshold=selection.threshold,
            select_s=select_s,
            exchange_s=exchange_s,
            rest_s=comm.now(grad.device) - started - select_s - exchange_s,
            skipped=not exchanged.healthy,
            **traffic_fields(comm.traffic),  # type: ignore[arg-type]
        )

    def _apply_(self, acc: Tensor, grad: Tensor, exchanged: Exchanged, scale: float) -> None:
        self.feedback.settle_(acc, grad, exchanged.sent if exchanged.healthy else None)
        if exchanged.healthy:
            for part in exchanged.update:
                part.add_to_(grad, alpha=scale)

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the state as plain data and tensors."""
        return Reducer.save(self, state) | {"selector": self.selector.save(state.selector)}

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state that ``save`` described."""
        state = Reducer.load(self, saved, dtype, device)
        state.selector = self.selector.load(saved["selector"])
        return state


@dataclass(frozen=True, slots=True)
class DenseReducer(Reducer):
    """The mean of all gradients, by one all-reduce: the baseline.

    Args:
        nonfinite: 'stop' raises on all ranks when the mean holds NaN or Inf, 'skip' makes that update zero.
    """

    nonfinite: Policy = "stop"

    def __post_init__(self) -> None:
        check_policy(self.nonfinite)

    @property
    def method(self) -> str:
        """Dense."""
        return "dense"

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state that only counts steps."""
        return BucketState(layout, 0, torch.zeros(0, dtype=dtype, device=device), None)

    def reduce_(self, state: BucketState, grad: Tensor, comm: Comm) -> StepStats:
        """Replace ``grad`` (numel,) by the mean over ranks; see Reducer."""
        started = comm.now(grad.device)
        waited = comm.traffic.elapsed_s
        comm.all_reduce_(grad)
        exchange_s = comm.traffic.elapsed_s - waited
        healthy = self._finish_(state, grad, comm)
        rest_s = comm.now(grad.device) - started - exchange_s
        return self._stats(state, grad, comm.traffic, comm, healthy=healthy, exchange_s=exchange_s, rest_s=rest_s)

    def launch(self, state: BucketState, grad: Tensor, comm: GroupComm) -> Callable[[], StepStats]:
        """Start the all-reduce of a bucket and let backward go on, as DDP itself does without a hook.

        Only the wait that nothing hides is reported as exchange_s: the one after backward.
        """
        if grad.is_cuda and comm.timed:  # times on a device need the host to wait
            return super(DenseReducer, self).launch(state, grad, comm)
        work, traffic = comm.all_reduce_async(grad), comm.traffic

        def finish() -> StepStats:
            started = time.perf_counter()
            work.wait()
            exchange_s = time.perf_counter() - started
            healthy = self._finish_(state, grad, comm)
            rest_s = time.perf_counter() - started - exchange_s
            return self._stats(state, grad, traffic, comm, healthy=healthy, exchange_s=exchange_s, rest_s=rest_s)

        return finish

    def _finish_(self, state: BucketState, total: Tensor, comm: Comm) -> bool:
        step = state.step
        state.step += 1
        total.div_(comm.world_size)
        bad = first_nonfinite(total)
        if bad is None:
            return True
        if self.nonfinite == "stop":
            raise mean_not_finite(state.layout.name_at(bad), step)
        total.zero_()
        return False

    def _stats(
        self,
        state: BucketState,
        grad: Tensor,
        traffic: Traffic,
        comm: Comm,
        *,
        healthy: bool,
        exchange_s: float,
        rest_s: float,
    ) -> StepStats:
        numel = grad.numel()
        return StepStats(
            step=state.step - 1,  # it was counted when its sum came
            numel=numel,
            rule=None,
            target_density=1.0,
            target_count=numel,
            counts=(numel,) * comm.world_size,
            local_count=numel,
            global_count=numel if healthy else 0,
            threshold=None,
            select_s=0.0,
            exchange_s=exchange_s,
            rest_s=rest_s,
            skipped=not healthy,
            **traffic_fields(traffic),  # type: ignore[arg-type]
        )
