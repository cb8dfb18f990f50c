"""The exchange oktopk: each rank sums one region of the vector, and all ranks get the k largest sums."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.indices import Int32
from micro.comm.ranks import Comm
from micro.comm.requests import AllGatherLists, AllReduce, Reduction
from micro.exchanges.base import Exchange, Needs, Transport, count_of
from micro.exchanges.header import Header, gather_header, header_call
from micro.exchanges.largest_sums import (
    HEAD,
    NUM_SUM_BINS,
    Largest,
    OktopkState,
    capacity_for,
    fits,
    largest_sums,
)
from micro.exchanges.predicted_traffic import Choice
from micro.exchanges.regions import add_up, add_up_calls, gather_sums, gather_sums_calls
from micro.parts import Rule, check_rule
from micro.predicted_traffic import Calls
from micro.values.sparse import Exchanged, Overlap, Selection, SparseValues, Step, equal_slice

REEVALUATE = 32  # steps between exact thresholds in the public code
NEAR_SHARE = 0.25  # sums in the bin of the k-th, relative to those chosen: 0.1 to 0.5 for independent normal gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Oktopk(Exchange[OktopkState]):
    """Sum the chosen entries in one region per rank, and send the k largest sums to all.

    A rank sends at most 6k (n-1)/n words, usually 4k (n-1)/n, as a mean over the ranks. Each chosen entry goes to the
    rank that owns its region, which sums them. Region boundaries follow the quantiles of the chosen indices, so all
    regions hold about equally many entries. The update has exactly min(k, U) sums at every step, with U distinct chosen
    indices: the largest, ties to the lowest index. A rank removes from its residual only what is in the update, so mass
    is conserved.

    A settled step takes three collectives: the sizes of the messages to regions, these messages, and one all-gather of
    rows of equal length with each region's largest sums, as many as any region held in the last step plus a tenth
    (`largest_sums`). If a row was too small, the regions are unknown or very unequal, or indices are packed, a
    histogram tells all ranks which bin contains the k-th sum; they gather that bin's sums, then the k largest. If one
    region holds far too many of these, they are first spread over the ranks.

    Bytes sent per rank, n ranks, k_r entries chosen, values of w bytes: at most (4 + w) k_r to the regions, and rows of
    16 + (4 + w) c to all, c at most 1.75 k / n. With the histogram and m_r of the k largest sums in the own region: (4
    + w) (n-1) m_r to all, and up to (4 + w) m_r for spreading. In addition, as counts: 4 (n-1) for the sizes and, at a
    repartition, 16 (n-1)^2 / n; 136 (n-1) for a histogram and w (n-1) for each sum near the threshold.

    Args:
        rule: 'repaired', or 'published': all sums above a reused threshold are sent; a hand-tuned controller adjusts
            the threshold. Constants are those of the public code for VGG-16, without balancing (``balance=None``).
            Bytes: 12 (n-1) in place of the histogram and the sums near the threshold, and (4 + w) (n-1) for every sum
            of the region at each re-evaluation.
        repartition: tau, steps between repartitions.
        balance: spread the chosen sums if one region holds more than ``balance`` times the mean; None: never.
        reevaluate: tau', for rule 'published': steps between re-evaluations, which gather all sums and set the
            threshold to the k-th magnitude. None: 32.

    Source: Li and Hoefler, PPoPP 2022, arXiv 2201.07598, algorithms 1 and 2, and its public code. Differences: exact at
    every step; rotation of destinations and bucketing of messages are left to the collective (one uneven all-to-all);
    the accumulator excludes the learning rate (as in the code, not in the paper); boundaries are summed as int64 (code:
    int32, which overflows); int32 indices (code for VGG-16: float32, wrong from 2^24 on); an empty selection proposes
    equal regions, and a single rank works (the code fails at both). As published: all of these except the first;
    without the code's 512 dense steps at the start; a new state between two re-evaluations, or one whose re-evaluation
    found only zeros, re-evaluates at once. The code for LSTM and BERT keeps nearly all that a re-evaluation applied in
    the residuals too, so it counts twice; that is not offered here.

    Raises:
        ValueError: no such rule, a period or ``balance`` less than 1, or a setting of another rule.
    """

    rule: Rule = "repaired"
    repartition: int = 64
    balance: float | None = 4.0
    reevaluate: int | None = None
    name: ClassVar[str] = "oktopk"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})
    needs: ClassVar[Needs] = Needs.RAW_VALUES

    def __post_init__(self) -> None:
        check_rule(self)
        if self.reevaluate is not None and self.rule != "published":
            raise ValueError(f"reevaluate of {self.name} is a setting of rule=published, got rule={self.rule}")
        for setting, period in (("reevaluate", self.reevaluate), ("repartition", self.repartition)):
            if period is not None and period < 1:
                raise ValueError(f"{setting} of {self.name} must be at least 1, got {period}")
        if self.balance is not None and not self.balance >= 1:
            raise ValueError(f"balance of {self.name} must be at least 1, or null for never, got {self.balance}")

    def start(self) -> OktopkState:
        """Return the state before the first step."""
        return OktopkState()

    def load(self, saved: dict[str, Any]) -> OktopkState:
        """Return the state that ``save`` described."""
        lists = {name: tuple(saved.get(name, ())) for name in ("boundaries", "held")}
        return OktopkState(**saved | lists)

    def exchange(
        self, state: OktopkState, acc: Tensor, selection: Selection, transport: Transport
    ) -> Reduction[Exchanged]:
        """Return the mean of all ranks at the largest sums of what they chose."""
        if self.moves(state, transport.step):
            state.boundaries = yield from self._boundaries(selection.indices, acc.numel(), transport.comm)
            state.held = ()
        mine = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        _, sums = yield from add_up(mine, tuple(pairwise(state.boundaries)), transport)
        if self.rule == "published":
            largest = yield from self._above_threshold(state, sums, mine, transport)
        else:
            largest = yield from largest_sums(state, sums, self.balance, mine, transport)
        total = largest.sums
        return Exchanged(
            update=(SparseValues(total.indices, total.values / transport.comm.world_size),),
            sent=SparseValues(*kernels.common(mine.indices, mine.values, total.indices)),
            counts=largest.header.counts,
            num_updated=total.indices.numel(),
            is_finite=largest.header.is_finite,
            overfull=largest.overfull,
        )

    def moves(self, state: OktopkState, step: Step) -> bool:
        """Return whether the regions are recomputed in this step."""
        return not state.boundaries or step.index % self.repartition == 0

    def _boundaries(self, indices: Tensor, numel: int, comm: Comm) -> Reduction[tuple[int, ...]]:
        """Return regions whose inner boundaries are the mean over ranks of the quantiles of their chosen indices.

        Args:
            indices: (k_r,) what this rank chose; an empty choice proposes equal regions.
        """
        n = comm.world_size
        if indices.numel():
            places = self._quantiles(indices.numel(), n).to(indices.device)
            proposed = indices.index_select(0, places).to(torch.int64)
        else:
            starts = [equal_slice(numel, n, part)[0] for part in range(1, n)]
            proposed = torch.tensor(starts, dtype=torch.int64, device=indices.device)
        mean = (yield AllReduce(mine=proposed, kind="counts")) // n
        return (0, *mean.tolist(), numel)  # host sync: once in tau steps

    def _quantiles(self, count: int, world_size: int) -> Tensor:
        """Return the positions (world_size - 1,) among ``count`` chosen indices of the proposed boundaries."""
        parts = torch.arange(1, world_size)
        if self.rule == "published":
            return parts * (count // world_size)  # the last region gets the rest
        return parts * count // world_size

    def _above_threshold(
        self, state: OktopkState, sums: SparseValues, mine: SparseValues, transport: Transport
    ) -> Reduction[Largest]:
        """Return the sums that the public code applies: the k largest at a re-evaluation, else all above a cut."""
        k = transport.step.target_count
        if state.threshold is None or transport.step.index % (self.reevaluate or REEVALUATE) == 0:
            return (yield from _reevaluated(state, sums.where(sums.values != 0), k, mine, transport))
        kept = sums.where(sums.values.abs() > state.threshold)
        header, held = yield from _header_and_counts(kept, mine, transport)
        state.threshold *= _factor(sum(held) / k)
        return Largest((yield from gather_sums(kept, held, state.boundaries, self.balance, transport)), header)

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Predict the messages to regions, then rows, or a histogram and the sums near the k-th; see Exchange."""
        to_regions, total = add_up_calls(choice, choice.chosen), choice.kept
        if self.rule == "published":
            return (*to_regions, header_call(1), *gather_sums_calls(choice)), total
        held, width = total / choice.world_size, choice.dtype.itemsize
        capacity = capacity_for(held + math.sqrt(held))  # regions are balanced: the largest count is near the mean
        if isinstance(choice.wire.indices, Int32) and fits(capacity, total, choice.world_size):
            return (*to_regions, ("gather_rows", 4 * HEAD + (4 + width) * capacity)), total
        histogram: Calls = header_call(NUM_SUM_BINS), ("gather_lists", NEAR_SHARE * held * width)
        return (*to_regions, *histogram, *gather_sums_calls(choice)), total


def _reevaluated(
    state: OktopkState, sums: SparseValues, k: int, mine: SparseValues, transport: Transport
) -> Reduction[Largest]:
    """Return the k largest of all ranks' sums, and set the threshold to the smallest."""
    header, held = yield from _header_and_counts(sums, mine, transport)
    indices = yield AllGatherLists(mine=sums.indices, counts=held, kind="counts")
    values = yield AllGatherLists(mine=sums.values, counts=held, kind="counts")
    total = SparseValues(indices, values).at(kernels.largest(values, k))
    state.threshold = float(total.values.abs().min()) if sum(held) else None  # host sync: once in tau' steps
    return Largest(total, header)


def _header_and_counts(
    sums: SparseValues, mine: SparseValues, transport: Transport
) -> Reduction[tuple[Header, list[int]]]:
    """Return the header of the step, and each rank's number of ``sums``."""
    extra, is_finite = count_of(sums.indices), transport.step.is_finite
    header = yield from gather_header(mine.indices, is_finite=is_finite, extra=extra)
    return header, [count for (count,) in header.extras]


def _factor(share: float) -> float:
    """Return the factor on the global threshold after a step that applied ``share`` of k."""
    if share < 2 / 3:
        return 1 / 1.008
    return 1.008 if share > 4 / 3 else 1.0
