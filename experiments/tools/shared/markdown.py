"""Write tables in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd


class Column(NamedTuple):
    """A column of a table: the key of its values, how they are written, and what they are multiplied by before."""

    key: str
    form: str = "{}"
    factor: float = 1

    def cell(self, value: Any) -> str:
        """Return a value in words; - where it is not known."""
        return value if isinstance(value, str) else "-" if pd.isna(value) else self.form.format(self.factor * value)


Columns = Mapping[str, Column]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """Return a Markdown table of cells as they are given, the first column to the left, others to the right.

    ``words``: all to the left.
    """
    frame = pd.DataFrame(list(rows), columns=list(columns))
    alignment = ["left", *["left" if words else "right"] * (len(columns) - 1)]
    return str(frame.to_markdown(index=False, disable_numparse=True, colalign=alignment))


def table_of(frame: pd.DataFrame, columns: Columns) -> str:
    """Return a Markdown table with a row for each of the frame's."""
    found = frame.reindex(columns=[column.key for column in columns.values()]).itertuples(index=False, name=None)
    return table(list(columns), [[c.cell(v) for c, v in zip(columns.values(), row, strict=True)] for row in found])
