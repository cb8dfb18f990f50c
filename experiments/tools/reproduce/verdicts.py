"""Whether a paper's claims hold here: each claim is a query of a part's table, and has one row in the result.

A claim holds where all its values are within its bounds, and does not where one is not. Of values that differ by seed
the interval of their mean counts (95 %, Student's t): where it reaches beyond a bound and does not lie beyond it,
nothing is decided.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from experiments.config.errors import UserError, one_line
from experiments.reports.names import human, label

BESIDE = "_beside"  # suffix of columns of the other row in a comparison
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # for 2, 3, ... values; the last also for more
DISTURBED = 1.25  # if the same work takes so many times as long, other programs ran
UNITS = {"workers": "{} workers", "world_size": "{} workers", "numel": "{:,} elements", "stream": "{} gradients"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim of a paper, as expressions for ``DataFrame.query`` and ``DataFrame.eval`` on a table.

    Attributes:
        says: what the paper claims; ``source``: where it says so.
        numbers: the table, a CSV below the folder of the reproduction.
        rows: which of its rows are asked about.
        beside: rows that each of these is compared with, where they agree in ``per``; their columns end in BESIDE.
        along: a column; the numbers of the rows beside are interpolated at its value, over its logarithm.
        value: of a row, or of a row and one beside; to be from ``at_least`` to ``at_most``.
        each: columns; rows that agree in them are judged together.
        over: the column of repetitions, such as seed; none: every value counts.
        steady: a column of the time that the same work took in both: where it differs by DISTURBED nothing is decided.
        here: the answer; {mean} and {half} of the interval, {least} and {most} of the values, {there} of {all} hold.
    """

    says: str
    source: str
    numbers: str
    rows: str
    value: str
    here: str
    at_least: float = -np.inf
    at_most: float = np.inf
    beside: str = ""
    per: Sequence[str] = ()
    along: str = ""
    each: Sequence[str] = ()
    over: str = ""
    steady: str = ""

    def __post_init__(self) -> None:
        if self.at_least == -np.inf and self.at_most == np.inf:
            raise ValueError(f"claim '{self.says}' needs at_least or at_most")


class Verdict(NamedTuple):
    """A row of the table of verdicts."""

    claim: str
    source: str
    here: str
    verdict: str


def verdicts(claim: Claim, folder: Path) -> Iterator[Verdict]:
    """Yield the verdicts of a claim, one for each group of rows. Raises: UserError: it does not fit the table."""
    path = folder / claim.numbers
    if not path.exists():
        yield Verdict(claim.says, claim.source, f"not measured: there is no {claim.numbers}", UNDECIDED)
        return
    try:
        judged = list(_judged(claim, pd.read_csv(path, dtype={"form": str})))
    except (KeyError, ValueError, TypeError, NameError, AttributeError, SyntaxError) as error:
        raise UserError(f"{path}: a verdict cannot be told: {one_line(error)}") from None
    if not judged:
        yield Verdict(claim.says, claim.source, "not measured: nothing to compare", UNDECIDED)
    for here, verdict in judged:
        yield Verdict(claim.says, claim.source, here, verdict)


def _judged(claim: Claim, table: pd.DataFrame) -> Iterator[tuple[str, str]]:
    rows = _compared(claim, table.assign(form=table["form"].fillna("")) if "form" in table else table)
    rows = rows.assign(asked=pd.Series(rows.eval(claim.value, engine="python"), index=rows.index, dtype=float))
    rows = rows[rows["asked"].notna()]
    groups = rows.groupby([*claim.each], sort=False) if claim.each else [((), rows)]
    for key, own in groups:
        if len(own):
            here, verdict = _of_group(claim, own)
            yield ": ".join(filter(None, [", ".join(map(_word, claim.each, key)), here])), verdict


def _compared(claim: Claim, table: pd.DataFrame) -> pd.DataFrame:
    rows = table.query(claim.rows, engine="python")
    if not claim.beside:
        return rows
    beside = table.query(claim.beside, engine="python")
    if claim.along:
        return _interpolated(rows, beside.sort_values(claim.along), claim.along)
    how = {"how": "inner", "on": list(claim.per)} if claim.per else {"how": "cross"}
    return rows.merge(beside, suffixes=("", BESIDE), **how)


def _interpolated(rows: pd.DataFrame, beside: pd.DataFrame, column: str) -> pd.DataFrame:
    inside = rows[rows[column].between(beside[column].min(), beside[column].max())]
    at, known = np.log(inside[column]), np.log(beside[column])
    numbers = beside.select_dtypes("number")
    if beside.empty:  # then no row is inside
        return inside.assign(**{f"{name}{BESIDE}": pd.Series(dtype=float) for name in numbers})
    return inside.assign(**{f"{name}{BESIDE}": np.interp(at, known, numbers[name]) for name in numbers})


def _of_group(claim: Claim, rows: pd.DataFrame) -> tuple[str, str]:
    values = rows.groupby(claim.over)["asked"].mean() if claim.over else rows["asked"]
    there = values.between(claim.at_least, claim.at_most)
    found = {"least": values.min(), "most": values.max(), "there": int(there.sum()), "all": len(values)}
    found |= {"mean": values.mean(), "half": _half(values)}
    verdict = HOLDS if there.all() else FAILS
    if claim.over:
        low, high = found["mean"] - found["half"], found["mean"] + found["half"]
        if low >= claim.at_least and high <= claim.at_most:
            verdict = HOLDS
        else:
            verdict = FAILS if high < claim.at_least or low > claim.at_most else UNDECIDED
    here = claim.here.format(**found)
    if claim.steady and (words := _unsteady(rows, claim.steady)):
        return f"{here}; {words}", UNDECIDED
    return here, verdict


def _half(values: pd.Series) -> float:
    if len(values) < 2:
        return float("inf")
    return float(T_95[min(len(values) - 2, len(T_95) - 1)] * values.std() / np.sqrt(len(values)))


def _unsteady(rows: pd.DataFrame, column: str) -> str:
    pairs = rows[[column, f"{column}{BESIDE}"]]
    ratio = (pairs.max(axis=1) / pairs.min(axis=1)).max()
    if ratio < DISTURBED:
        return ""
    return f"WARNING: the machine was disturbed, {column} differs by a factor of {ratio:.2f} between paired runs"


def _word(column: str, value: object) -> str:
    """Return a group's value in a column, in words."""
    column, beside, _ = column.partition(BESIDE)
    name = label(str(value)) if column in ("sparsifier", "method") else human(str(value).removeprefix("schedule="))
    words = UNITS[column].format(value) if column in UNITS else name
    return f"over {words}" if beside and column in ("sparsifier", "method") else words
