"""The measures of test sets: name, format and drawing of each, in one place."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.config.errors import UserError


@dataclass(frozen=True, slots=True)
class Metric:
    """A measure of a trained model, as the rows of ``epochs.jsonl`` hold it.

    Attributes:
        key: its name in records, frames and the CSV beside a figure.
        label: of an axis.
        column: heading in a table.
        scale: what a recorded value is multiplied by to be read by people, 100 for shares.
        digits: after the point, in a table.
        higher_is_better: a measure of which less is better is unbounded above, and drawn on a logarithmic axis.
    """

    key: str
    label: str
    column: str
    scale: float
    digits: int
    higher_is_better: bool

    @property
    def name(self) -> str:
        """Its name in a sentence."""
        return self.key.replace("_", " ")

    def format(self, value: float) -> str:
        """Write a recorded value, or a distance of two, as tables do."""
        return f"{self.scale * value:.{self.digits}f}"

    def tick(self, value: float) -> str:
        """Write a recorded value as axes do."""
        return f"{self.scale * value:g}"


# Of those that a run records, the first stands for it in figures and tables.
METRICS = (
    Metric("accuracy", "test accuracy (%)", "accuracy %", 100, 2, higher_is_better=True),
    Metric("perplexity", "test perplexity", "perplexity", 1, 1, higher_is_better=False),
    Metric("hit_rate", "hit rate at 10 (%)", "HR@10 %", 100, 2, higher_is_better=True),
    Metric("ndcg", "NDCG at 10 (%)", "NDCG@10 %", 100, 2, higher_is_better=True),
    Metric("bits_per_byte", "bits per byte of the test set", "bits per byte", 1, 3, higher_is_better=False),
)


def metric_of(keys: Iterable[str]) -> Metric:
    """Return the measure that stands for a run: the first of METRICS among the keys of a row, or columns of a frame.

    Raises:
        UserError: none is there.
    """
    present = set(keys)
    for metric in METRICS:
        if metric.key in present:
            return metric
    raise UserError(f"none of {', '.join(metric.key for metric in METRICS)} was measured")


def in_words(row: Mapping[str, Any]) -> str:
    """Write the measure of an epoch's row for a line of progress, ``accuracy 0.93``; empty where it has none."""
    values = ((metric.name, row.get(metric.key)) for metric in METRICS)
    return next((f"{name} {value:.4g}" for name, value in values if value is not None), "")
