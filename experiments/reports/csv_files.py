"""Numbers as comma-separated values."""

from pathlib import Path

import pandas as pd

from experiments.reports.output import write_file


def write_csv(numbers: pd.DataFrame, path: Path) -> Path:
    """Write numbers with eight digits and the same line ends everywhere; returns the path. Raises: OSError."""
    return write_file(path, numbers.to_csv(index=False, float_format="%.8g", lineterminator="\n"))
