"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

import pandas as pd


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of cells as they are given, the first column to the left, the others to the right."""
    frame = pd.DataFrame(list(rows), columns=list(columns))
    alignment = ["left", *["right"] * (len(columns) - 1)]
    return str(frame.to_markdown(index=False, disable_numparse=True, colalign=alignment))
