"""Summarise the statistics of a step over all buckets."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from micro.reducers.stats import StepStats


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Statistics of all reductions of a step on one rank. Densities are equal on all ranks, times and bytes its own.

    Attributes:
        buckets: the statistics of each reduced vector, in the order in which they were reduced; at least one.
        exposed_s: seconds of backward after the last gradient: communication without overlap; NaN on an accelerator,
            unless the attachment is timed.
    """

    buckets: tuple[StepStats, ...]
    exposed_s: float = 0.0

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self.buckets[0].step

    @property
    def skipped(self) -> bool:
        """Whether the update is zero because a gradient had NaN or Inf."""
        return any(bucket.skipped for bucket in self.buckets)

    @property
    def target_density(self) -> float:
        """Share of all elements (or bins) to select."""
        return self._sum(lambda bucket: bucket.target_count) / self._num_choices

    @property
    def density(self) -> float:
        """Share of all elements in the update, including densely reduced parameters."""
        return self._sum(lambda bucket: bucket.global_count) / self._num_choices

    @property
    def local_density(self) -> float:
        """Share of all elements that this rank chose."""
        return self._sum(lambda bucket: bucket.local_count) / self._num_choices

    @property
    def dense_share(self) -> float:
        """Share of all elements in parameters, or steps, that are reduced densely."""
        return self._sum(lambda bucket: bucket.dense_numel) / self._sum(lambda bucket: bucket.numel)

    @property
    def density_error(self) -> float:
        """abs(density / target_density - 1): the papers' compression-ratio error."""
        return abs(self.density / self.target_density - 1)

    @property
    def imbalance(self) -> float:
        """Largest count of a rank relative to the mean, minus 1, over all buckets; 0 = balanced."""
        counts = [sum(ranks) for ranks in zip(*(bucket.counts for bucket in self.buckets), strict=True)]
        return max(counts) * len(counts) / sum(counts) - 1 if sum(counts) else 0.0

    @property
    def thresholds(self) -> tuple[float, float] | None:
        """The lowest and highest threshold on abs(acc) of all buckets; None if there was none."""
        cuts = [bucket.threshold for bucket in self.buckets if bucket.threshold is not None]
        return (min(cuts), max(cuts)) if cuts else None

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sent."""
        return self._sum(lambda bucket: bucket.bytes_sent)

    @property
    def num_collectives(self) -> int:
        """Number of collectives called."""
        return sum(bucket.num_collectives for bucket in self.buckets)

    @property
    def select_s(self) -> float:
        """Seconds of selection; NaN on an accelerator, unless the attachment is timed."""
        return self._sum(lambda bucket: bucket.select_s)

    @property
    def exchange_s(self) -> float:
        """Seconds inside collectives, waiting included; see select_s."""
        return self._sum(lambda bucket: bucket.exchange_s)

    @property
    def rest_s(self) -> float:
        """Seconds in everything else of the reductions; see select_s."""
        return self._sum(lambda bucket: bucket.rest_s)

    def numbers(self) -> dict[str, float]:
        """Return the numbers above by name, for a logger, without missing times and thresholds."""
        names = (
            *("density", "target_density", "density_error", "local_density", "dense_share", "imbalance"),
            *("bytes_sent", "num_collectives", "select_s", "exchange_s", "rest_s", "exposed_s", "skipped"),
        )
        numbers = {name: float(getattr(self, name)) for name in names}
        found = {name: number for name, number in numbers.items() if not math.isnan(number)}
        if self.thresholds is not None:
            found["threshold_min"], found["threshold_max"] = self.thresholds
        return found

    @property
    def _num_choices(self) -> float:
        return self._sum(lambda bucket: bucket.num_choices)

    def _sum(self, number: Callable[[StepStats], float]) -> float:
        return sum(map(number, self.buckets))
