"""A share of a bucket: some of its parameters as a vector of their own; and the statistics of two shares as one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.sparse import SparseValues
from micro.stats import StepStats, traffic_fields


@dataclass(frozen=True, slots=True)
class Share:
    """Some of the parameters of a flat vector.

    Attributes:
        layout: of these parameters alone.
        runs: where they lie in the whole vector; neighbours are one run.
    """

    layout: Layout
    runs: tuple[slice, ...]

    def take(self, whole: Tensor) -> Tensor:
        """Return the share of ``whole`` (numel,): a view where it is one run, else a copy."""
        pieces = [whole[run] for run in self.runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def part_of(self, values: SparseValues) -> SparseValues:
        """Return those of ``values`` (k,) that lie in the share, at their places in what ``take`` returns."""
        device = values.indices.device
        starts = torch.tensor([run.start for run in self.runs], device=device)
        stops = torch.tensor([run.stop for run in self.runs], device=device)
        lengths = stops - starts
        runs = torch.searchsorted(starts, values.indices.long(), right=True) - 1  # -1: before the first run
        is_in = (runs >= 0) & (values.indices < stops[runs])
        shifts = (lengths.cumsum(0) - lengths - starts)[runs[is_in]]
        return SparseValues((values.indices[is_in] + shifts).to(torch.int32), values.values[is_in])

    def put_back_(self, whole: Tensor, vector: Tensor) -> None:
        """Write ``vector``, which ``take`` returned, to its places in ``whole`` (numel,)."""
        start = 0
        for run in self.runs:
            piece = whole[run]
            if piece.data_ptr() != vector[start:].data_ptr():
                piece.copy_(vector[start : start + piece.numel()])
            start += piece.numel()


def share_of(layout: Layout, is_in: Callable[[str, Sequence[int]], bool]) -> Share | None:
    """Return the share of the parameters for whose name and shape ``is_in`` holds; None where they have no element."""
    pairs: list[tuple[str, tuple[int, ...]]] = []
    runs: list[slice] = []
    for (name, place), shape in zip(layout.slices(), layout.shapes, strict=True):
        if not is_in(name, shape):
            continue
        pairs.append((name, shape))
        if runs and runs[-1].stop == place.start:
            runs[-1] = slice(runs[-1].start, place.stop)
        else:
            runs.append(place)
    if not any(run.stop > run.start for run in runs):
        return None
    return Share(Layout(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs)), tuple(runs))


def together(dense: StepStats, sparse: StepStats, numel: int, comm: Comm) -> StepStats:
    """Return the statistics of a step in which both shares were reduced, the dense one first.

    Args:
        dense: of the dense share.
        sparse: of the other one.
        numel: of both.
        comm: whose traffic of the step holds that of both.
    """
    count = dense.numel + sparse.target_count
    return replace(
        sparse,
        numel=numel,
        target_density=count / numel,
        target_count=count,
        counts=tuple(dense.numel + chosen for chosen in sparse.counts),
        local_count=dense.numel + sparse.local_count,
        global_count=dense.numel + sparse.global_count,
        spans=replace(
            sparse.spans,
            exchange=dense.spans.exchange + sparse.spans.exchange,
            rest=dense.spans.rest + sparse.spans.rest,
        ),
        num_bins=dense.numel + sparse.num_bins if sparse.num_bins else None,
        dense_numel=dense.numel,
        **traffic_fields(comm.traffic),
    )
