"""What is known of runs that are not at hand: rows of means, and rows of single runs, of committed tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError, one_line
from experiments.reports.run_rows import SAME, joined, read_run_rows

ORIGIN = ("code", "machine")
NUMBERS = ("num_seeds", "value", "to_dense", "total_bytes", "measured_density")
TEXTS = ("model", "dataset", "sparsifier", "variant", "change", "metric", "manifests", *ORIGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of means over seeds, of which a committed CSV keeps the rows of runs that are gone.

    Attributes:
        name: of its files: NAME.csv has the means, NAME_runs.csv a row per run.
        same: columns that tell one row from another.
        more: columns beside these and NUMBERS without which a CSV is no such table.
    """

    name: str
    same: Sequence[str]
    more: Sequence[str] = ()

    def needed(self) -> list[str]:
        """Return the columns without which a CSV is no such table."""
        return [*self.same, *NUMBERS, "metric", *self.more]

    def empty(self) -> pd.DataFrame:
        """Return no rows."""
        return pd.DataFrame(columns=[*self.needed(), *ORIGIN, "is_earlier"])


REACHED = Table(name="reached", same=SAME, more=["manifests"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """Rows of earlier tables: ``means``, all marked, and ``runs`` as of ``run_rows``."""

    means: pd.DataFrame = field(default_factory=REACHED.empty)
    runs: pd.DataFrame | None = None

    def with_runs(self, own: pd.DataFrame, same: Sequence[str] = SAME) -> pd.DataFrame:
        """Return rows of runs at hand and the earlier ones; see ``joined``."""
        return own if self.runs is None else joined(self.runs, own, same)


NOTHING = Earlier()


def read(means: Path | None, runs: Path | None, table: Table = REACHED) -> Earlier:
    """Read earlier tables, each a CSV that `experiments.figures` wrote, or None. Raises: UserError where it is none."""
    return Earlier(
        means=table.empty() if means is None else _read_means(means, table),
        runs=None if runs is None else read_run_rows(runs, f"{table.name}_runs.csv", table.same),
    )


def merged(earlier: pd.DataFrame, runs: pd.DataFrame, own: pd.DataFrame, same: Sequence[str] = SAME) -> pd.DataFrame:
    """Return the rows of one study: earlier ones that stay, and ``own``, the means of ``runs``, of all else."""
    kept = staying(earlier, runs, same)
    parts = [part for part in (kept, own.assign(is_earlier=False)) if not part.empty]
    return pd.concat(parts, ignore_index=True).drop_duplicates(list(same), keep="first") if parts else kept


def staying(earlier: pd.DataFrame, runs: pd.DataFrame, same: Sequence[str] = SAME) -> pd.DataFrame:
    """Return the rows of one study that stay beside its runs at hand: all of which these have not as many seeds.

    Where a sparse one stays, the dense ones that it was compared with stay too.
    """
    seeds = runs.drop_duplicates("run").groupby(list(same)).size().rename("at_hand").reset_index()
    at_hand = earlier.merge(seeds, on=list(same), how="left")["at_hand"].fillna(0).to_numpy()
    stays, is_dense = at_hand < earlier["num_seeds"].to_numpy(), earlier["sparsifier"] == "dense"
    return earlier[stays | (is_dense & bool((stays & ~is_dense).any()))]


def elsewhere(earlier: pd.DataFrame, runs: pd.DataFrame, study: Sequence[str]) -> pd.DataFrame:
    """Return the earlier rows of studies that have no run at hand."""
    others = earlier.merge(runs[list(study)].drop_duplicates(), on=list(study), how="left", indicator=True)
    return others[others["_merge"] == "left_only"].drop(columns="_merge")


def mark(row: pd.Series) -> str:
    """Return the mark of an earlier row, as text to append."""
    return "*" if row.get("is_earlier", False) else ""


def notes(rows: pd.DataFrame) -> list[str]:
    """Return a line that explains the mark of earlier rows, where there are some."""
    marked = rows[rows["is_earlier"].astype(bool)]
    if marked.empty:
        return []
    machines = ", ".join(sorted(set(marked["machine"]) - {""})) or "unknown machines"
    codes = ", ".join(sorted({code for text in marked["code"] for code in text.split(", ") if code}))
    return [
        f"\\* {len(marked)} of {len(rows)} rows are from an earlier table, of runs that are not at hand ({machines}; "
        f"code revisions {codes or 'unknown'}). Rows beside them are compared with their dense row, and may be of "
        "another revision."
    ]


def _read_means(path: Path, table: Table) -> pd.DataFrame:
    try:
        rows = pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str), keep_default_na=False, na_values=_numbers(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, pd.errors.ParserError) as error:
        raise UserError(f"{path} is no table of numbers: {one_line(error)}; give a {table.name}.csv") from None
    missing = [key for key in table.needed() if key not in rows]
    if missing:
        raise UserError(f"{path} is no {table.name}.csv of experiments.figures: it has no {', '.join(missing)}")
    return rows.assign(is_earlier=True, **{key: rows.get(key, "") for key in ORIGIN})


def _numbers(path: Path) -> dict[str, list[str]]:
    return {key: [""] for key in pd.read_csv(path, nrows=0).columns if key not in TEXTS}
