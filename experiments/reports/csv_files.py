"""Numbers as comma-separated values."""

from pathlib import Path

import pandas as pd


def write_csv(numbers: pd.DataFrame, path: Path) -> Path:
    """Write numbers with eight digits and the same line ends everywhere; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers.to_csv(path, index=False, float_format="%.8g", lineterminator="\n")
    return path
