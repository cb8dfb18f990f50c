"""Ok-Topk as in its public code: sums above a reused threshold, which a controller moves between searches."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.exchanges.base import Transport
from micro.exchanges.gathering import Header, count_of, gather_header, header_call
from micro.exchanges.largest_sums import Largest, OktopkState
from micro.exchanges.oktopk import Oktopk
from micro.exchanges.regions import add_up_calls
from micro.exchanges.traffic import Choice
from micro.requests import AllGatherLists, Reduction
from micro.sparse import SparseValues
from micro.traffic import Calls


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedOktopk(Oktopk):
    """Add up in regions, and share the sums above a reused threshold, which a hand-tuned controller moves.

    Every ``reevaluate`` steps all sums are gathered, and the threshold becomes the k-th magnitude. Constants are those
    of the public code for VGG-16, whose balancing is switched off (``balance=None``).

    Bytes sent per rank as with `Oktopk`, but 12 (n-1) in place of the histogram and the sums near the threshold, and
    (4 + w) (n-1) for every sum of the region at each re-evaluation.

    Args:
        reevaluate: tau', steps from one exact threshold to the next.
        repartition, balance: see `Oktopk`.

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
        Oktopk.__post_init__(self)
        if self.reevaluate < 1:
            raise ValueError(f"reevaluate of {self.name} must be at least 1, got {self.reevaluate}")

    def quantiles(self, count: int, world_size: int) -> Tensor:
        """Return places count // world_size entries apart; the last region gets the rest."""
        return torch.arange(1, world_size) * (count // world_size)

    def largest_sums(
        self, state: OktopkState, sums: SparseValues, mine: SparseValues, transport: Transport
    ) -> Reduction[Largest]:
        """Return what the public code applies: at a re-evaluation the k largest, else all above the threshold."""
        k = transport.step.target_count
        if state.threshold is None or transport.step.index % self.reevaluate == 0:
            return (yield from _reevaluated(state, sums.where(sums.values != 0), k, mine, transport))
        kept = sums.where(sums.values.abs() > state.threshold)
        header, held = yield from _counted(kept, mine, transport)
        state.threshold *= _factor(sum(held) / k)
        return Largest((yield from self.gather(state, kept, held, transport)), header)

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return entries to their regions, the header, and the sums above the threshold; see Exchange."""
        return (*add_up_calls(choice, choice.chosen), header_call(1), *self._gather_calls(choice)), choice.kept


def _reevaluated(
    state: OktopkState, sums: SparseValues, k: int, mine: SparseValues, transport: Transport
) -> Reduction[Largest]:
    """Return the k largest of all ranks' sums, and set the threshold to the smallest of them."""
    header, held = yield from _counted(sums, mine, transport)
    indices = yield AllGatherLists(mine=sums.indices, counts=held, kind="counts")
    values = yield AllGatherLists(mine=sums.values, counts=held, kind="counts")
    total = SparseValues(indices, values).at(kernels.largest(values, k))
    state.threshold = float(total.values.abs().min()) if sum(held) else None  # host sync: once in tau' steps
    return Largest(total, header)


def _counted(sums: SparseValues, mine: SparseValues, transport: Transport) -> Reduction[tuple[Header, list[int]]]:
    """Return the header of the step, and how many of its ``sums`` each rank has."""
    extra, is_finite = count_of(sums), transport.step.is_finite
    header = yield from gather_header(mine.indices, is_finite=is_finite, extra=extra)
    return header, [count for (count,) in header.extras]


def _factor(share: float) -> float:
    """Return the factor on the global threshold after a step that applied ``share`` of k."""
    if share < 2 / 3:
        return 1 / 1.008
    return 1.008 if share > 4 / 3 else 1.0
