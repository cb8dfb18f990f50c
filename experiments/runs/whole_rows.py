"""Find out which rows of a record are whole: the one reader of records that all commands use."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.runs.atomic_files import RecordError
from experiments.runs.disks import reason
from experiments.runs.row_chain import NO_ROWS, expected_sum, own_sum

Row = dict[str, Any]
_STEP = re.compile(rb'\{"step": (\d+)[,}]')
_NUMBERS = {"steps.jsonl": "step", "epochs.jsonl": "epoch"}  # what counts the rows of a file


class DamagedRows(RecordError):
    """Rows that are missing or not as they were written: one line with the file and the first such line."""


class Extent(NamedTuple):
    """Number of rows of a file, and the sum of the last of them: what checkpoints and DONE hold of a record."""

    rows: int
    sum: str


@dataclass(slots=True)
class Span:
    """The rows of a file that are whole, from the first on.

    Attributes:
        rows: their number.
        sum: of the last of them.
        end: offset behind the last of them, in bytes.
        step: of the last of them; -1 without any.
        number: of the last of them, its step or its epoch; None where it has none.
        num_unverified: those that an earlier version wrote, without a sum; they are the first ones.
        is_cut: the line behind them has no end.
        problem: what is wrong with the line behind them; empty where there is none, or where reading stopped.
    """

    rows: int = 0
    sum: int = NO_ROWS
    end: int = 0
    step: int = -1
    num_unverified: int = 0
    is_cut: bool = False
    problem: str = ""
    number: int | None = None

    @property
    def extent(self) -> Extent:
        """Their number and last sum."""
        return Extent(self.rows, f"{self.sum:08x}")


def whole_rows(path: Path, *, is_later: Callable[[int], bool] = lambda step: False, limit: int | None = None) -> Span:
    """Read a record as far as it is whole.

    Args:
        is_later: whether to stop before a row, by its step.
        limit: rows after which to stop.

    Raises:
        RecordError: the file cannot be read.
    """
    span = Span()
    try:
        with path.open("rb") as file:
            for line in file:
                if span.rows == limit or not _take(span, line, path, is_later):
                    break
    except OSError as error:
        raise RecordError(f"cannot read records: {path}: {reason(error)}") from None
    return span


def check_rows(path: Path, expected: Extent) -> Span:
    """Return the first rows of a file, which are whole and as many as expected; later ones are not read.

    Raises:
        DamagedRows: rows are missing or damaged.
        RecordError: the file cannot be read.
    """
    if not path.exists():
        if expected.rows == 0:
            return Span()
        raise DamagedRows(f"{path} is missing, with {counted(expected.rows)}")
    span = whole_rows(path, limit=expected.rows)
    if span.problem:
        raise DamagedRows(span.problem)
    if span.rows < expected.rows:
        middle = ", in the middle of a row" if span.is_cut else ""
        raise DamagedRows(f"{path} ends after {counted(span.rows)} of {expected.rows}{middle}")
    if span.extent != expected:
        raise DamagedRows(f"{path}, line {span.rows} is not the row that was written there: the file was replaced")
    return span


def complete_lines(path: Path, end: int = -1) -> list[bytes]:
    """Return the lines of a file that end before an offset, or all, without their newlines. Raises: RecordError."""
    try:
        with path.open("rb") as file:
            return file.read(end).split(b"\n")[:-1]
    except OSError as error:
        raise RecordError(f"cannot read records: {path}: {reason(error)}") from None


def counted(number: int) -> str:
    """Return a number of rows in words."""
    return "1 row" if number == 1 else f"{number} rows"


def extents_from(value: Any) -> Mapping[str, Extent] | None:
    """Return what a checkpoint or DONE holds of the records; None where an earlier version wrote it.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    if value is None:
        return None
    return {kind: Extent(int(value[kind]["rows"]), str(value[kind]["sum"])) for kind in ("steps", "epochs")}


def _take(span: Span, line: bytes, path: Path, is_later: Callable[[int], bool]) -> bool:
    """Add a line to the rows that are whole; return False where it is none, or later."""
    if not line.endswith(b"\n"):
        span.is_cut = True
        return False
    claimed = own_sum(line)
    is_whole = claimed is not None and expected_sum(line, span.sum) == claimed
    found = _numbers(line, path.name, trusted=is_whole)
    if isinstance(found, str):
        return _refuse(span, path, found)
    step, number = found
    if claimed is not None and not is_whole:
        return _refuse(span, path, _difference(span, path, number))
    if claimed is None and span.rows > span.num_unverified:
        return _refuse(span, path, "has no sum, and the rows before it have: it was changed or added")
    if span.number is not None and number is not None and number > span.number + 1:
        return _refuse(span, path, _difference(span, path, number))
    if is_later(step):
        return False
    span.rows, span.end, span.step, span.number = span.rows + 1, span.end + len(line), step, number
    span.sum = claimed or NO_ROWS
    span.num_unverified += claimed is None
    return True


def _refuse(span: Span, path: Path, what: str) -> bool:
    span.problem = f"{path}, line {span.rows + 1} {what}"
    return False


def _numbers(line: bytes, name: str, *, trusted: bool) -> tuple[int, int | None] | str:
    """Return the step of a row and the number that counts the rows of its file, or what is wrong with it."""
    if trusted and (found := _STEP.match(line)):
        return int(found[1]), int(found[1])
    row = row_or_nothing(line)
    if row is None:
        return "is not a record"
    step, number = row.get("step", -1), row.get(_NUMBERS.get(name, ""))
    if name in _NUMBERS and not ("step" in row and isinstance(step, int)):
        return "has no step"
    return step, number if isinstance(number, int) else None


def _difference(span: Span, path: Path, number: int | None) -> str:
    """Return in which way a row is not the next one."""
    kind, before = _NUMBERS.get(path.name, "step"), span.number
    if number is None or number == (0 if before is None else before + 1):
        return "was changed after it was written"
    if before is None:
        return f"has {kind} {number}: rows before it are missing"
    if number > before + 1:
        missing = str(before + 1) if number == before + 2 else f"{before + 1} to {number - 1}"
        return f"has {kind} {number}: the rows of {kind} {missing} are missing before it"
    return f"has {kind} {number} where {before + 1} belongs: rows were repeated or moved"


def row_or_nothing(line: bytes) -> Row | None:
    """Return the row of a line, None where it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
