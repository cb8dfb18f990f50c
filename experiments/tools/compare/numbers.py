"""Prepare the rows of a comparison for tables and figures."""

import numpy as np
import pandas as pd

from experiments.reports.names import in_order
from experiments.tools.shared.gradient_sources import TITLES

Point = tuple[float, float]


def ordered_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows ordered by stream, number of workers and method."""
    orders = {"stream": list(TITLES), "method": in_order(frame["method"])}

    def places(column: pd.Series) -> pd.Series:
        return column.map(orders[str(column.name)].index) if column.name in orders else column

    return frame.sort_values(["stream", "world_size", "method"], key=places, kind="stable", ignore_index=True)


def sparse_rows(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of sparse methods; others have no density error."""
    return numbers[numbers.groupby("method")["density"].transform("min") < 1]


def volumes(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the bytes that a worker sent in a step, also in four-byte values per target index."""
    sending = numbers[numbers["bytes_share"] > 0]
    dense_bytes = 2 * 4 * sending["numel"] * (sending["world_size"] - 1) / sending["world_size"]
    sent = sending["bytes_share"] * dense_bytes
    words = sent / (4 * sending["density"] * sending["numel"])
    return sending[["method", "stream", "world_size"]].assign(bytes_sent=sent, words_per_k=words)


def tradeoff_numbers(numbers: pd.DataFrame, further: pd.DataFrame) -> pd.DataFrame:
    """Return error and compression for all densities, on the stream and number of workers of the further ones."""
    rows = pd.concat([numbers[numbers["stream"] == further["stream"].iloc[0]], further], ignore_index=True)
    rows = rows[rows["bytes_share"] > 0].assign(compression=1 / rows["bytes_share"])
    columns = ["method", "stream", "world_size", "density", "compression", "step_error", "cumulative_error"]
    return rows[columns].drop_duplicates(["method", "density"]).sort_values(["method", "density"], ignore_index=True)


def front(points: list[Point]) -> list[Point]:
    """Return the Pareto-optimal points (less is better), from left to right."""
    kept: list[Point] = []
    for x, y in sorted(set(points)):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


def front_methods(rows: pd.DataFrame, error: str) -> list[str]:
    """Return the methods on the front of ``error`` against bytes, least bytes first."""
    finite = rows[np.isfinite(rows[error]) & (rows["bytes_share"] > 0)]
    named = dict(zip(zip(finite["bytes_share"], finite[error], strict=True), finite["method"], strict=True))
    return [named[point] for point in front(list(named))]
