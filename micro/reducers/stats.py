"""The statistics of one step of a bucket."""

from dataclasses import dataclass, field
from typing import Any

import torch

from micro.comm.ranks import Comm, Op, Spans, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Statistics of a reduction on one rank. Counts and densities are equal on all ranks, times and bytes its own.

    Attributes:
        step: number of the step, from 0.
        numel: length d of the flat vector.
        rule: the selector's rule, if it has several.
        target_count: k, the number of indices to select.
        counts: number of indices that each rank chose.
        local_count: number that this rank chose.
        global_count: distinct indices in the update.
        threshold: on abs(acc), if there was one.
        counts_bytes, indices_bytes, values_bytes: bytes sent by this rank (see micro.comm.ranks).
        calls: the collectives called, with sizes (micro.comm.ranks.OPS).
        local_bytes: the bytes that stayed within a node, with two levels.
        local_calls: the collectives within a node, with sizes; ``calls`` are then those between nodes.
        spans: seconds of parts of the reduction, also ``select_s``, ``exchange_s`` and ``rest_s``; NaN on an
            accelerator, unless the attachment is timed.
        skipped: whether a gradient or the update had NaN or Inf, in any bucket of the step: the updates of all buckets
            are then zero on all ranks, and residuals keep everything.
        relative_error: L2 norm of the unsent part of this rank's accumulator, relative to the accumulator's, if the
            method computes it.
        forgotten: L2 norm of what decay removed from this rank's residual, if there is a decay.
        num_bins: number of bins of the spectrum, if a method selects bins; counts and densities then refer to bins.
        overfull: whether the selection exceeded a message of fixed capacity, so that another message followed.
        num_shared: number of collectives in ``calls`` that are counted in another bucket, whose message came first.
        dense_numel: elements of densely reduced parameters; counts, targets and densities include them.
    """

    step: int
    numel: int
    rule: str | None
    target_density: float
    target_count: int
    counts: tuple[int, ...]
    local_count: int
    global_count: int
    threshold: float | None
    counts_bytes: float
    indices_bytes: float
    values_bytes: float
    calls: tuple[tuple[Op, float], ...]
    skipped: bool
    spans: Spans = field(default_factory=Spans)
    relative_error: float | None = None
    forgotten: float | None = None
    num_bins: int | None = None
    overfull: bool = False
    num_shared: int = 0
    dense_numel: int = 0
    local_bytes: float = 0.0
    local_calls: tuple[tuple[Op, float], ...] = ()

    @property
    def select_s(self) -> float:
        """Seconds of selection."""
        return self.spans.select

    @property
    def exchange_s(self) -> float:
        """Seconds inside collectives, waiting included."""
        return self.spans.exchange

    @property
    def rest_s(self) -> float:
        """Seconds in everything else of the reduction."""
        return self.spans.rest

    @property
    def num_collectives(self) -> int:
        """Number of collectives called, without those counted in another bucket."""
        return len(self.calls) + len(self.local_calls) - self.num_shared

    @property
    def num_choices(self) -> int:
        """Number of elements, or bins, to choose from."""
        return self.num_bins or self.numel

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sent."""
        return self.counts_bytes + self.indices_bytes + self.values_bytes

    @property
    def between_bytes(self) -> float:
        """Bytes that this rank sent to other nodes; with one level, all."""
        return self.bytes_sent - self.local_bytes

    @property
    def local_density(self) -> float:
        """Share of the vector that this rank chose."""
        return self.local_count / self.num_choices

    @property
    def global_density(self) -> float:
        """Share of the vector in the update."""
        return self.global_count / self.num_choices

    @property
    def density_error(self) -> float:
        """abs(global_count / target_count - 1): the papers' compression-ratio error."""
        return abs(self.global_count / self.target_count - 1)

    @property
    def build_up(self) -> float:
        """Updated indices relative to the target; 1 = no build-up."""
        return self.global_count / self.target_count

    @property
    def imbalance(self) -> float:
        """Largest count of a rank relative to the mean, minus 1; 0 = balanced."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total - 1 if total else 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """How long a reduction had run, and waited for collectives, when its step began."""

    at: float
    waited: float

    @classmethod
    def of(cls, comm: Comm, device: torch.device) -> "Start":
        """Return the present."""
        return cls(comm.now(device), comm.clock.waited)


def stats_of(
    start: Start,
    comm: Comm,
    device: torch.device,
    *,
    step: int,
    numel: int,
    target_density: float = 1.0,
    target_count: int | None = None,
    counts: tuple[int, ...] | None = None,
    global_count: int | None = None,
    rule: str | None = None,
    threshold: float | None = None,
    select: float = 0.0,
    **rare: Any,
) -> StepStats:
    """Return the statistics of a reduction that ends now, as if its step counted; counts are all elements by default.

    Args:
        start: when it began.
        comm: has counted what it sent.
        select: seconds choosing.
        rare: fields of StepStats that have a default.
    """
    counts = (numel,) * comm.world_size if counts is None else counts
    rest = comm.now(device) - start.at - select
    return StepStats(
        step=step,
        numel=numel,
        rule=rule,
        target_density=target_density,
        target_count=numel if target_count is None else target_count,
        counts=counts,
        local_count=counts[comm.rank],
        global_count=numel if global_count is None else global_count,
        threshold=threshold,
        skipped=False,
        spans=Spans(select=select, exchange=comm.clock.waited - start.waited, rest=rest),
        **traffic_fields(comm.traffic),
        **rare,
    )


def traffic_fields(traffic: Traffic) -> dict[str, Any]:
    """Return the fields of StepStats that a step's traffic fills, but for the time."""
    sent = traffic.num_bytes
    return {
        "counts_bytes": sent["counts"],
        "indices_bytes": sent["indices"],
        "values_bytes": sent["values"],
        "calls": tuple(traffic.calls),
        "num_shared": traffic.num_shared,
        "local_bytes": traffic.local_bytes,
        "local_calls": tuple(traffic.local_calls),
    }
