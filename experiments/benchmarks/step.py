"""Every method's reduction against its floor.

Methods are those of conf/sparsifier. The floor is what a sparse step has to move whatever it selects:
``residual.add_(grad)``, one read of the rank's own slice, ``grad.zero_()``. It is timed beside every single step, so
that a machine that slows down slows both. ``floors`` is what a step takes beside the wire, select + rest, by that time:
its median over steps and, in brackets, the middle half of them; ``passes`` is how often one more step, which is not
timed, goes over the vector (`experiments.benchmarks.passes`). The floor itself makes two and a part. ``bytes`` are
those that such a step reads and writes for each element, ``bytes in floors`` the same by a floor's (18 with two ranks):
what the step would take at the floor's speed. A goal that is missed with more bytes than it allows is marked so.

Each method's line is printed, and kept, as soon as it is measured. A command that was stopped goes on with the methods
that are left when it is given again; it begins again where the code has changed.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pandas as pd
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.goals import goal, verdict
from experiments.benchmarks.step_rows import KeptRows
from experiments.benchmarks.step_work import TOPK, work
from experiments.config.command_line import comma_list
from experiments.config.option_types import to_density, to_positive, whole_number
from experiments.config.ranges import MOST_ON_A_MACHINE
from experiments.launching.measurements import Row, Settings, ranks_of_measurement
from experiments.launching.rank_group import RankGroup
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from experiments.studies.methods import build_methods, known_methods, select_names

NAME = "step"
COLUMNS = (
    "method",
    "select ms",
    "rest ms",
    "exchange ms",
    "total ms",
    "floor ms",
    "floors",
    "middle half",
    "goal",
    "met",
    "passes",
    "bytes",
    "bytes in floors",
    "MB sent",
    "density / target",
    "steps",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--numel",
        type=comma_list(whole_number()),
        default="11181642",
        metavar="D,D",
        help="lengths d (%(default)s: ResNet-18)",
    )
    parser.add_argument("--density", type=comma_list(to_density), default="0.01", metavar="P,P", help="(%(default)s)")
    parser.add_argument(
        "--methods", type=comma_list(str), default=[], metavar="A,B", help="names of conf/sparsifier; all by default"
    )
    parser.add_argument("--nproc", type=whole_number(1, MOST_ON_A_MACHINE), default=2, help="ranks")
    parser.add_argument("--steps", type=whole_number(), default=15, help="steps that count, after a warm-up")
    parser.add_argument(
        "--limit",
        type=to_positive,
        default=7.0,
        metavar="SECONDS",
        help="about the longest that a method may take, by fewer steps, though never fewer than 15 (%(default)s)",
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    methods = select_names(arguments.methods, known_methods(), "methods")
    build_methods(methods, arguments.density[0])  # a mistake shows here, not on the ranks
    kept, rows = KeptRows(arguments.out / "step.partial.jsonl"), []
    num_rows = len(arguments.numel) * len(arguments.density) * (len(methods) + 1)
    for row, is_kept in _measured(arguments, [*methods, TOPK], kept):
        rows.append(row)
        how = "kept from before" if is_kept else f"{row['took_s']:.1f} s"
        console.print(f"{len(rows)} of {num_rows}: {_line(row)} ({how})", highlight=False, markup=False)
    for start in range(0, len(rows), len(methods) + 1):
        part = rows[start : start + len(methods) + 1]
        console.print(_table(part))
        console.print(_summary(part), highlight=False, markup=False)
    for path in write_or_rescue(lambda out: [write_csv(pd.DataFrame(rows), out / "step.csv")], arguments.out):
        console.print(f"wrote {path}")
    kept.forget()


def _measured(arguments: argparse.Namespace, methods: list[str], kept: KeptRows) -> Iterator[tuple[Row, bool]]:
    """Yield the row of each method at each length and density, and whether it was kept from before."""
    shared = {"nproc": arguments.nproc, "steps": arguments.steps, "limit_s": arguments.limit}
    with ExitStack() as stack:
        ranks: RankGroup | None = None
        for numel in arguments.numel:
            for density in arguments.density:
                for method in methods:
                    settings = {"method": method, "numel": numel, "density": density, **shared}
                    if (before := kept.find(settings)) is not None:
                        yield before, True
                        continue
                    ranks = ranks or stack.enter_context(ranks_of_measurement(arguments.nproc))
                    row = _measure(ranks, settings)
                    kept.keep(settings, row)
                    yield row, False


def _measure(ranks: RankGroup, settings: Settings) -> Row:
    started = time.perf_counter()
    row = ranks.call(work, settings)[0]
    took_s = time.perf_counter() - started
    return {**settings, **row, "goal_floors": goal(settings["method"]), "took_s": took_s}


def _line(row: Row) -> str:
    """Return what is printed of a row once it is there."""
    least = row["goal_floors"]
    against = f", goal {least:g}: {_verdict(row)}" if least else ""
    at = f"d = {row['numel']:,}, density {row['density']:g}"
    return f"{row['method']}, {at}: {row['floors']:.2f} floors, middle half {_middle(row)}{against}"


def _verdict(row: Row) -> str:
    return verdict(row["method"], row["floors"], row["bytes_in_floors"])


def _middle(row: Row) -> str:
    return f"{row['floors_q1']:.2f}-{row['floors_q3']:.2f}"


def _summary(rows: list[Row]) -> str:
    """Return how many methods meet their goals, and the names of the others."""
    verdicts = {row["method"]: _verdict(row) for row in rows}
    held = [method for method, word in verdicts.items() if word]
    missed = [method for method in held if verdicts[method] != "yes"]
    return f"{len(held) - len(missed)} of {len(held)} methods meet their goals; not: {', '.join(missed) or 'none'}"


def _table(rows: list[Row]) -> Table:
    title = "d = {numel:,}, density {density:g}, {nproc} ranks; medians of steps".format(**rows[0])
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"],
            *(f"{1e3 * row[key]:.2f}" for key in ("select_s", "rest_s", "exchange_s", "total_s", "floor_s")),
            f"{row['floors']:.2f}",
            _middle(row),
            f"{row['goal_floors']:g}" if row["goal_floors"] else "",
            _verdict(row),
            f"{row['passes']:.1f}",
            f"{row['bytes_per_element']:.1f}",
            f"{row['bytes_in_floors']:.2f}",
            f"{row['bytes_sent'] / 1e6:.3f}",
            f"{row['build_up']:.2f}",
            f"{row['counted']}",
        )
    return table
