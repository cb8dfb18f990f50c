"""The reducer dense: the mean of all gradients, by one all-reduce."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction
from micro.predicted_traffic import Bucket, Volume
from micro.reducers.base import BucketState, Reducer
from micro.reducers.outcome import Outcome, checked
from micro.reducers.stats import Start, stats_of
from micro.values.finite import Policy, check_policy
from micro.values.flat import Layout


@dataclass(frozen=True, slots=True)
class DenseReducer(Reducer):
    """The mean of all gradients, by one all-reduce: the baseline.

    Gradients are summed in their dtype, as in DDP without a hook; in half precision each rank first divides by the
    number of ranks, so that the sum cannot overflow if the mean does not. Rounding errors are lost; there is no
    residual.

    Args:
        nonfinite: 'stop' raises on all ranks if the mean has NaN or Inf, 'skip' makes that update zero.
    """

    nonfinite: Policy = "stop"
    name: ClassVar[str] = "dense"
    is_one_sum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_policy(self.nonfinite)

    def volume(self, bucket: Bucket) -> Volume:
        """Return the all-reduce of all elements; see Reducer."""
        return bucket.volume((("all_reduce", bucket.numel * bucket.element_bytes),), bucket.numel)

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state that only counts steps."""
        return BucketState(layout, 0, {"residual": torch.zeros(0, dtype=dtype, device=device)})

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        """Replace ``grad`` (numel,) by the mean over ranks; nothing is kept."""
        return (yield from self.mean(state, grad, comm, is_last=True))

    def mean(self, state: BucketState, grad: Tensor, comm: Comm, *, is_last: bool) -> Reduction[Outcome]:
        """Do what `reduction` does; ``is_last`` says that the bucket's reduction ends with it."""
        start, is_half = Start.of(comm, grad.device), grad.dtype in (torch.float16, torch.bfloat16)
        if is_half:
            grad.mul_(1 / comm.world_size)
        yield AllReduce(mine=grad, last=is_last)
        if not is_half:
            if comm.world_size.bit_count() == 1:  # a power of two: the same bits, in half the time
                grad.mul_(1 / comm.world_size)
            else:
                grad.div_(comm.world_size)
        found = yield from checked(grad, is_finite=True, num_updated=grad.numel(), last=is_last)
        stats = stats_of(start, comm, grad.device, step=state.step, numel=grad.numel())
        state.step += 1
        return Outcome(stats=stats, grad=grad, findings=found.findings(state.layout, None))
