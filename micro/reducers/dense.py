"""The dense mean: every gradient, by one all-reduce."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm, GroupComm, Traffic
from micro.flat import Layout
from micro.kernels.reference import first_nonfinite
from micro.nonfinite import Policy, check_policy, mean_not_finite
from micro.reducers.base import BucketState, Reducer
from micro.stats import StepStats, traffic_fields


@dataclass(frozen=True, slots=True)
class DenseReducer(Reducer):
    """The mean of all gradients, by one all-reduce: the baseline.

    Args:
        nonfinite: 'stop' raises on all ranks when the mean holds NaN or Inf, 'skip' makes that update zero.
    """

    nonfinite: Policy = "stop"
    name: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        check_policy(self.nonfinite)

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state that only counts steps."""
        return BucketState(layout, 0, {"residual": torch.zeros(0, dtype=dtype, device=device)})

    def reduce_(self, state: BucketState, grad: Tensor, comm: Comm) -> StepStats:
        """Replace ``grad`` (numel,) by the mean over ranks; see Reducer."""
        started = comm.now(grad.device)
        waited = comm.traffic.elapsed_s
        comm.all_reduce_(grad)
        exchange_s = comm.traffic.elapsed_s - waited
        is_finite = self._finish_(state, grad, comm)
        rest_s = comm.now(grad.device) - started - exchange_s
        return self._stats(state, grad, comm.traffic, comm, is_finite=is_finite, exchange_s=exchange_s, rest_s=rest_s)

    def launch(self, state: BucketState, grad: Tensor, comm: GroupComm) -> Callable[[], StepStats]:
        """Start the all-reduce of a bucket and let backward go on, as DDP itself does without a hook.

        Only the wait after backward, which nothing hides, is reported as exchange_s.
        """
        if grad.is_cuda and comm.timed:  # times on a device need the host to wait
            return super(DenseReducer, self).launch(state, grad, comm)
        work, traffic = comm.all_reduce_async(grad), comm.traffic

        def finish() -> StepStats:
            started = time.perf_counter()
            work.wait()
            exchange_s = time.perf_counter() - started
            is_finite = self._finish_(state, grad, comm)
            rest_s = time.perf_counter() - started - exchange_s
            return self._stats(state, grad, traffic, comm, is_finite=is_finite, exchange_s=exchange_s, rest_s=rest_s)

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
        is_finite: bool,
        exchange_s: float,
        rest_s: float,
    ) -> StepStats:
        numel = grad.numel()
        return StepStats(
            step=state.step - 1,  # counted by _finish_
            numel=numel,
            rule=None,
            target_density=1.0,
            target_count=numel,
            counts=(numel,) * comm.world_size,
            local_count=numel,
            global_count=numel if is_finite else 0,
            threshold=None,
            select_s=0.0,
            exchange_s=exchange_s,
            rest_s=rest_s,
            skipped=not is_finite,
            **traffic_fields(traffic),  # type: ignore[arg-type]
        )
