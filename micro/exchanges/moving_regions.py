"""Sums in regions whose boundaries follow what the ranks choose: what the two rules of Ok-Topk share."""

from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.exchanges.base import Exchange, Header, Wire, gather_header, gather_indices
from micro.exchanges.regions import Spans, Transport
from micro.health import Finite
from micro.partition import equal_slice
from micro.requests import AllGatherLists, AllReduce, Reduction
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step


@dataclass(slots=True)
class OktopkState:
    """What all ranks know before a step.

    Attributes:
        boundaries: where regions begin and end, world_size + 1 of them, ascending; empty before the first step.
        threshold: the global threshold, on the magnitude of sums over ranks; None where it must be searched.
        held: how many of the largest sums each region gave in the last step; empty where boundaries have moved since.
        room: share by which a region may give more of them than the one that gave most in the last step.
    """

    boundaries: tuple[int, ...] = ()
    threshold: float | None = None
    held: tuple[int, ...] = ()
    room: float = 0.0


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest sums of all regions.

    Attributes:
        sums: ascending by index, the same on all ranks.
        header: of the step.
        overfull: see Exchanged.
    """

    sums: SparseValues
    header: Header
    overfull: bool = False


@dataclass(frozen=True, slots=True)
class RegionStep:
    """One step of an exchange by regions.

    Attributes:
        step: the same on all ranks.
        mine: what this rank chose.
        is_finite: whether this rank's gradient was finite.
    """

    step: Step
    mine: SparseValues
    is_finite: Finite
    transport: Transport

    def gather_header(self, extra: Tensor) -> Reduction[Header]:
        """Gather counts, finite flags and ``extra`` (m,) integers of all ranks; every step does so once."""
        return gather_header(self.mine.indices, is_finite=self.is_finite, extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingRegions(Exchange[OktopkState]):
    """Add up in regions, one for each rank, and share the largest sums.

    Every rank sends each entry it chose to the rank in whose region it lies. That rank adds them up; the largest sums
    of all regions, divided by n, are the update: a subclass says which. What a rank sent leaves its residual only where
    it is part of the update, so that mass is conserved. Regions follow the quantiles of what the ranks choose, so each
    holds about as many entries as any other.

    Args:
        repartition: tau, steps from one repartition to the next.
        balance: spread the chosen sums when one region holds more than ``balance`` times the mean; None never does.

    Raises:
        ValueError: ``repartition`` or ``balance`` less than 1.
    """

    repartition: int = 64
    balance: float | None = 4.0
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})
    encodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.repartition < 1:
            raise ValueError(f"repartition of {self.name} must be at least 1, got {self.repartition}")
        if self.balance is not None and not self.balance >= 1:
            raise ValueError(f"balance of {self.name} must be at least 1, or null for never, got {self.balance}")

    @abstractmethod
    def quantiles(self, count: int, world_size: int) -> Tensor:
        """Return the places (world_size - 1,) int64, among ``count`` chosen indices, of the boundaries to propose."""

    @abstractmethod
    def largest_sums(self, state: OktopkState, sums: SparseValues, now: RegionStep) -> Reduction[Largest]:
        """Return the sums of all regions that are applied.

        Args:
            sums: of this rank's region.
        """

    def start(self) -> OktopkState:
        """Return the state before the first step."""
        return OktopkState()

    def load(self, saved: dict[str, Any]) -> OktopkState:
        """Return the state that ``save`` described."""
        lists = {name: tuple(saved.get(name, ())) for name in ("boundaries", "held")}
        return OktopkState(**saved | lists)

    def exchange(
        self,
        state: OktopkState,
        acc: Tensor,
        selection: Selection,
        *,
        step: Step,
        overlap: Overlap,
        wire: Wire,
        comm: Comm,
        is_finite: Finite,
    ) -> Reduction[Exchanged]:
        """Return the mean of all ranks at the largest sums of what they chose."""
        if self.moves(state, step):
            state.boundaries = yield from self._boundaries(selection.indices, acc.numel(), comm)
            state.held = ()
        mine = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        transport = Transport(comm, wire, (step.seed, step.index, comm.rank))
        _, sums = yield from transport.add_up(mine, tuple(pairwise(state.boundaries)))
        largest = yield from self.largest_sums(state, sums, RegionStep(step, mine, is_finite, transport))
        return _update_of(largest, mine, comm)

    def moves(self, state: OktopkState, step: Step) -> bool:
        """Return whether regions are found again in this step."""
        return not state.boundaries or step.index % self.repartition == 0

    def _boundaries(self, indices: Tensor, numel: int, comm: Comm) -> Reduction[tuple[int, ...]]:
        """Return regions whose inner boundaries are the mean over ranks of the quantiles of what each chose.

        Args:
            indices: (k_r,) what this rank chose; an empty choice proposes equal regions.
        """
        n = comm.world_size
        if indices.numel():
            places = self.quantiles(indices.numel(), n).to(indices.device)
            proposed = indices.index_select(0, places).to(torch.int64)
        else:
            starts = [equal_slice(numel, n, part)[0] for part in range(1, n)]
            proposed = torch.tensor(starts, dtype=torch.int64, device=indices.device)
        mean = (yield AllReduce(mine=proposed, kind="counts")) // n
        return (0, *mean.tolist(), numel)  # host sync: once in tau steps

    def gather(
        self, state: OktopkState, mine: SparseValues, held: list[int], transport: Transport
    ) -> Reduction[SparseValues]:
        """Return all regions' chosen sums, ascending; spread over the ranks before where one holds far too many.

        Args:
            mine: the chosen sums of this rank's region.
            held: how many each rank holds.
        """
        spans, numel, comm = tuple(pairwise(state.boundaries)), state.boundaries[-1], transport.comm
        if self.balance is not None and max(held) * comm.world_size > self.balance * sum(held):
            mine, held = yield from _spread(mine, held, spans, transport)
            spans = ((0, numel),) * comm.world_size
        chosen = Selection(mine.indices, spans=spans)
        indices = yield from gather_indices(chosen, tuple(held), Overlap.ANY, numel, transport.wire.indices, comm)
        return SparseValues(indices, (yield AllGatherLists(mine=mine.values, counts=held, kind="values")))


def _update_of(largest: Largest, mine: SparseValues, comm: Comm) -> Exchanged:
    """Return the mean of all ranks at the largest sums of what they chose, of which this rank chose ``mine``."""
    total = largest.sums
    return Exchanged(
        update=(SparseValues(total.indices, total.values / comm.world_size),),
        sent=_common(mine, total.indices),
        counts=largest.header.counts,
        num_updated=total.indices.numel(),
        is_finite=largest.header.is_finite,
        overfull=largest.overfull,
    )


def _spread(
    mine: SparseValues, held: list[int], regions: Spans, transport: Transport
) -> Reduction[tuple[SparseValues, list[int]]]:
    """Move entries to neighbouring ranks, their order kept, until all hold as many, give or take one."""
    n, rank, total = transport.comm.world_size, transport.comm.rank, sum(held)
    starts = [0, *accumulate(held)]
    slices = [equal_slice(total, n, part) for part in range(n)]
    leaving = [_overlap((starts[rank], starts[rank + 1]), part) for part in slices]
    coming = [_overlap(have, slices[rank]) for have in pairwise(starts)]
    _, moved = yield from transport.scatter(mine, (leaving, coming), ((regions[rank],) * n, regions))
    return moved, [stop - start for start, stop in slices]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _common(mine: SparseValues, indices: Tensor) -> SparseValues:
    """Return the entries of ``mine`` at ``indices`` (K,), which ascend."""
    if not indices.numel():
        return SparseValues(indices, mine.values[:0])
    walked = kernels.common(mine.indices, mine.values, indices)
    if walked is not None:
        return SparseValues(*walked)
    places = torch.searchsorted(indices, mine.indices).clamp_(max=indices.numel() - 1)
    return mine.where(indices.index_select(0, places) == mine.indices)
