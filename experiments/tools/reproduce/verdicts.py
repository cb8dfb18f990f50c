"""Check whether a paper's claims hold here, from the numbers of a figure, and write the answer as a sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.config.errors import UserError, one_line

BESIDE = "_beside"  # ends the columns of the rows that are compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question to a table that a part writes, in the words of ``DataFrame.query`` and ``DataFrame.eval``.

    Attributes:
        numbers: name of the table, a CSV in the part's folder.
        rows: which of its rows are asked about.
        beside: rows that each of these is compared with, where they agree in ``per``; their columns end in BESIDE.
        per: columns. Without ``beside``, of the rows that agree in them the least value counts.
        nearest: a column; of the rows beside, each is compared with the one that is nearest in it.
        value: of a row, or of a row and one beside.
        holds: a condition on ``value``.
        says: the answer; {least}, {most}: of the values, {there}, {all}: how many of them hold, and how many there are.
    """

    numbers: str
    rows: str
    value: str
    holds: str
    says: str
    beside: str = ""
    per: Sequence[str] = ()
    nearest: str = ""


def answer(question: Question, folder: Path) -> str:
    """Return the sentence of a question, with its verdict: *holds*, *holds in part* or *does not hold here*.

    Raises:
        UserError: the question does not fit the table.
    """
    path = folder / question.numbers
    if not path.exists():
        return f"Ours: not measured, there is no {question.numbers}."
    try:
        values = _values(question, pd.read_csv(path, dtype={"form": str}))
        there = _evaluated(pd.DataFrame({"value": values}), question.holds)
    except (KeyError, ValueError, TypeError, NameError, AttributeError, SyntaxError) as error:
        raise UserError(f"{path}: a verdict cannot be told: {one_line(error)}") from None
    if values.empty:
        return "Ours: not measured, the runs have nothing to compare."
    found = {"least": values.min(), "most": values.max(), "there": int(there.sum()), "all": len(values)}
    verdict = "holds" if there.all() else "holds in part" if there.any() else "does not hold here"
    return f"Ours: {question.says.format(**found)} The claim *{verdict}*."


def _values(question: Question, table: pd.DataFrame) -> pd.Series:
    table = table.assign(form=table["form"].fillna("")) if "form" in table else table
    rows, per = table.query(question.rows, engine="python"), list(question.per)
    if not question.beside:
        values = _evaluated(rows, question.value)
        return values.groupby([rows[column] for column in per]).min() if per else values
    beside = table.query(question.beside, engine="python")
    named = rows.assign(row_number=range(len(rows)))
    joined = named.merge(beside, how="inner" if per else "cross", on=per or None, suffixes=("", BESIDE))
    if question.nearest:
        ratio = joined[question.nearest] / joined[f"{question.nearest}{BESIDE}"]
        joined = joined.assign(away=np.abs(np.log(ratio))).sort_values("away").drop_duplicates("row_number")
    return _evaluated(joined, question.value)


def _evaluated(rows: pd.DataFrame, expression: str) -> pd.Series:
    return pd.Series(rows.eval(expression, engine="python"), index=rows.index, dtype=float).dropna()
