"""Ok-Topk as in its public code: sums above a reused threshold, which a controller moves between searches."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.exchanges.base import count_of
from micro.exchanges.moving_regions import Largest, MovingRegions, OktopkState, RegionStep
from micro.requests import AllGatherLists, Reduction
from micro.sparse import SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedOktopk(MovingRegions):
    """Add up in regions, and share the sums above a reused threshold, which a hand-tuned controller moves.

    Every ``reevaluate`` steps all sums are gathered, and the threshold becomes the k-th magnitude. Constants are those
    of the public code for VGG-16, whose balancing is switched off (``balance=None``).

    Bytes sent per rank as with `Oktopk`, but 12 (n-1) in place of the histogram and the sums near the threshold, and
    (4 + w) (n-1) for every sum of the region at each re-evaluation.

    Args:
        reevaluate: tau', steps from one exact threshold to the next.
        repartition, balance: see `MovingRegions`.

    Source: Li and Hoefler, PPoPP 2022, arXiv 2201.07598, algorithms 1 and 2, and its public code for VGG-16.
    Differences: those of `Oktopk`, but for the histogram; without the code's 512 dense steps at the start; a state that
    is new between two re-evaluations, or whose re-evaluation found only zeros, re-evaluates at once. The code for LSTM
    and BERT leaves nearly all that a re-evaluation applied in the residuals as well: counted twice, and not offered
    here.

    Raises:
        ValueError: a period or ``balance`` less than 1.
    """

    reevaluate: int = 32
    name: ClassVar[str] = "oktopk"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False

    def __post_init__(self) -> None:
        MovingRegions.__post_init__(self)
        if self.reevaluate < 1:
            raise ValueError(f"reevaluate of {self.name} must be at least 1, got {self.reevaluate}")

    def quantiles(self, count: int, world_size: int) -> Tensor:
        """Return places count // world_size entries apart; the last region gets the rest."""
        return torch.arange(1, world_size) * (count // world_size)

    def largest_sums(self, state: OktopkState, sums: SparseValues, now: RegionStep) -> Reduction[Largest]:
        """Return what the public code applies: at a re-evaluation the k largest, else all above the threshold."""
        k = now.step.target_count
        if state.threshold is None or now.step.index % self.reevaluate == 0:
            return (yield from _reevaluated(state, sums.where(sums.values != 0), k, now))
        kept = sums.where(sums.values.abs() > state.threshold)
        header = yield from now.gather_header(count_of(kept))
        held = [count for (count,) in header.extras]
        state.threshold *= _factor(sum(held) / k)
        return Largest((yield from self.gather(state, kept, held, now.transport)), header)


def _reevaluated(state: OktopkState, sums: SparseValues, k: int, now: RegionStep) -> Reduction[Largest]:
    """Return the k largest of all ranks' sums, and set the threshold to the smallest of them."""
    header = yield from now.gather_header(count_of(sums))
    held = [count for (count,) in header.extras]
    indices = yield AllGatherLists(mine=sums.indices, counts=held, kind="counts")
    values = yield AllGatherLists(mine=sums.values, counts=held, kind="counts")
    chosen = kernels.largest(values, k)
    total = SparseValues(indices.index_select(0, chosen), values.index_select(0, chosen))
    state.threshold = float(total.values.abs().min()) if sum(held) else None  # host sync: once in tau' steps
    return Largest(total, header)


def _factor(share: float) -> float:
    """Return the factor on the global threshold after a step that applied ``share`` of k."""
    if share < 2 / 3:
        return 1 / 1.008
    return 1.008 if share > 4 / 3 else 1.0
