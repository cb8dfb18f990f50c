"""`experiments.bench step --against`: methods by an older revision of this code and by the code as it is, in turn.

Ranks of both are there for the whole comparison and wait while the others measure: they start once, and loops are
compiled once. For each method they take turns of a few steps, and what is compared is the ratio of a pair of turns.
Both are measured by this code's `step_turns`, which is copied into the older revision.
"""

import argparse
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from experiments.benchmarks import step_turns
from experiments.benchmarks.against import checked_out, commit_of
from experiments.benchmarks.step_rows import KeptRows
from experiments.config.errors import UserError
from experiments.config.paths import ROOT
from experiments.launching.failures import RankFailure
from experiments.launching.measurements import Row, Settings, ranks_of_measurement
from experiments.launching.rank_group import RankGroup
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from experiments.studies.methods import build_methods, known_methods, select_names

PAIRS = 7
OLD, NEW = "the older revision", "this code"
VALUES = ("floors", "own_s", "total_s", "bytes_sent")
QUARTERS = {"_q1": 0.25, "": 0.5, "_q3": 0.75}


class Sides:
    """Ranks of the older revision and of this code.

    Args:
        stack: ends them.
        console: says when they are there.
    """

    def __init__(self, revision: str, nproc: int, stack: ExitStack, console: Console) -> None:
        self._revision = revision
        self._nproc = nproc
        self._stack = stack
        self._console = console
        self._sides: dict[str, RankGroup] = {}

    def measure(self, settings: Settings) -> list[tuple[Row, Row]]:
        """Return the medians of each pair of turns, of the older revision and of this code.

        Raises:
            UserError: one of the two cannot measure the method.
        """
        step_s = max(self._call(side, step_turns.begin, settings) for side in (OLD, NEW))
        warmup, counted = step_turns.counts(step_s, settings["steps"], settings["limit_s"] / 2)
        for side in (OLD, NEW):
            self._call(side, step_turns.turn, warmup - step_turns.NUM_TRIED)
        size, pairs = math.ceil(counted / settings["pairs"]), []
        for number in range(settings["pairs"]):
            order = (OLD, NEW) if number % 2 else (NEW, OLD)
            found = {side: self._call(side, step_turns.turn, size) for side in order}
            pairs.append((found[OLD], found[NEW]))
        return pairs

    def start(self) -> None:
        """Start both sides' ranks, and have them load or compile what all methods need; once."""
        if self._sides:
            return
        started = time.perf_counter()
        tree = self._stack.enter_context(checked_out(self._revision))
        shutil.copy(step_turns.__file__, tree / Path(step_turns.__file__).relative_to(ROOT))
        for side, code in ((OLD, tree), (NEW, None)):
            self._sides[side] = self._stack.enter_context(ranks_of_measurement(self._nproc, code))
        for side in (OLD, NEW):
            self._sides[side].send(step_turns.prepare)
        for side in (OLD, NEW):
            self._answer(side)
        took_s = time.perf_counter() - started
        self._console.print(f"ranks of both, with their loops, are there after {took_s:.0f} s", highlight=False)

    def _call(self, side: str, function: Callable[[Any], Any], argument: object) -> Any:
        self._sides[side].send(function, argument)
        return self._answer(side)

    def _answer(self, side: str) -> Any:
        try:
            return self._sides[side].receive()[0]
        except RankFailure as error:
            raise UserError(f"{side} cannot measure this: {error}") from error


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Compare method by method; print each, then all, and write the table."""
    methods = select_names(arguments.methods, known_methods(), "methods")
    build_methods(methods, arguments.density[0])  # a mistake shows here, not on the ranks
    cases = list(product(arguments.numel, arguments.density, methods))
    kept, rows = KeptRows(arguments.out / "step-against.partial.jsonl"), []
    with ExitStack() as stack:
        sides = Sides(arguments.against, arguments.nproc, stack, console)
        for row, how in _compared(arguments, cases, kept, sides):
            rows.append(row)
            console.print(f"{len(rows)} of {len(cases)}: {_line(row)} ({how})", highlight=False, markup=False)
    console.print(_table(rows, arguments.against))
    for path in write_or_rescue(lambda out: [write_csv(pd.DataFrame(rows), out / "step-against.csv")], arguments.out):
        console.print(f"wrote {path}")
    kept.forget()


def _compared(
    arguments: argparse.Namespace, cases: list[tuple[int, float, str]], kept: KeptRows, sides: Sides
) -> Iterator[tuple[Row, str]]:
    """Yield the row of each case, and the seconds that it took or that it was kept from before."""
    shared = {
        "against": commit_of(arguments.against),
        "nproc": arguments.nproc,
        "steps": arguments.steps,
        "pairs": arguments.pairs,
    }
    for numel, density, method in cases:
        settings = {"method": method, "numel": numel, "density": density, "limit_s": arguments.limit, **shared}
        row = kept.find(settings)
        if row is not None:
            yield row, "kept from before"
            continue
        sides.start()
        started = time.perf_counter()
        row = {**settings, **ratios(sides.measure(settings))}
        kept.keep(settings, row)
        yield row, f"{time.perf_counter() - started:.1f} s"


def ratios(pairs: list[tuple[Row, Row]]) -> Row:
    """Return the quartiles over pairs of new / old, and the medians over pairs of both sides' floors."""
    row: Row = {}
    for value in VALUES:
        found = pd.Series([new[value] / old[value] for old, new in pairs])
        row |= {value + suffix: float(found.quantile(share)) for suffix, share in QUARTERS.items()}
    for place, side in enumerate(("old", "new")):
        row[f"{side}_floors"] = float(pd.Series([pair[place]["floors"] for pair in pairs]).median())
    return row


def _line(row: Row) -> str:
    at = f"d = {row['numel']:,}, density {row['density']:g}"
    floors = f"{row['old_floors']:.2f} floors before, {row['new_floors']:.2f} now"
    return f"{row['method']}, {at}: {floors}, ratio {_numbers(row, 'floors')}"


def _numbers(row: Row, value: str) -> str:
    return f"{row[value]:.3f} ({row[f'{value}_q1']:.3f} to {row[f'{value}_q3']:.3f})"


def _table(rows: list[Row], revision: str) -> Table:
    table = Table(
        title=f"step: this code over {revision}, {rows[0]['pairs']} pairs of turns: median ratio (middle half)"
    )
    names = ("method", "d", "density", "floors before", "floors now")
    for name in (*names, "floors", "select + rest", "whole step", "bytes sent"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        sides = (f"{row[f'{side}_floors']:.2f}" for side in ("old", "new"))
        numbers = (_numbers(row, value) for value in VALUES)
        table.add_row(row["method"], f"{row['numel']:,}", f"{row['density']:g}", *sides, *numbers)
    return table
