"""Time every method's reduction, relative to its floor or to another revision of this code.

Methods are those of conf/sparsifier. The floor is the memory traffic of any sparse step: ``residual.add_(grad)``, one
read of the rank's slice, ``grad.zero_()``. It is timed next to every single step, so that a slower machine slows both.
*floors* is a step's time without communication, select + rest, in floors: the median over steps, and the middle half.
*bytes an element* are those read and written by one more, untimed step; *in floors*, divided by a floor's bytes: the
step's time at the floor's speed.

With --against, ranks of both revisions stay up for the whole comparison. For each method they alternate in turns of a
few steps; the result is the ratio new / old of each pair of turns. Loops of the other revision are compiled first,
which takes up to a minute. A stopped command writes its finished part.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product

import pandas as pd
from rich.console import Console

from experiments.config.command_line import comma_list
from experiments.config.errors import UserError
from experiments.config.ranges import MOST_ON_A_MACHINE
from experiments.tools.bench import tables
from experiments.tools.bench.step import traffic
from experiments.tools.bench.step.measure import Case, Turn, measure
from experiments.tools.bench.step.older import checked_out
from experiments.tools.bench.tables import Column, Columns
from experiments.tools.profile.method_steps import TOPK, Times
from experiments.tools.ranks.group import GroupError, RankGroup, measuring_ranks
from experiments.tools.ranks.measures import Row
from experiments.tools.shared.methods import build_methods, known_methods, select_names
from experiments.tools.shared.options import to_density, to_positive, whole_number

NAME = "step"
OLD, NEW = "the other revision", "this code"
MEDIANS = ("select_s", "rest_s", "exchange_s", "total_s", "floor_s", "floors", "bytes_sent", "build_up")
RATIOS = ("floors", "own_s", "total_s", "bytes_sent")
CASE: Columns = {
    "method": Column("method"),
    "d": Column("numel", "{:,.0f}"),
    "density": Column("density", "{:g}"),
}
STEP: Columns = {
    **CASE,
    "select ms": Column("select_s", "{:.2f}", 1e3),
    "rest ms": Column("rest_s", "{:.2f}", 1e3),
    "exchange ms": Column("exchange_s", "{:.2f}", 1e3),
    "total ms": Column("total_s", "{:.2f}", 1e3),
    "floor ms": Column("floor_s", "{:.2f}", 1e3),
    "floors": Column("floors", "{:.2f}"),
    "middle half": Column("floors_half"),
    "bytes an element": Column("bytes_per_element", "{:.1f}"),
    "in floors": Column("bytes_in_floors", "{:.2f}"),
    "MB sent": Column("bytes_sent", "{:.3f}", 1e-6),
    "density / target": Column("build_up", "{:.2f}"),
    "steps": Column("steps", "{:.0f}"),
}
AGAINST: Columns = {
    **CASE,
    "floors before": Column("old_floors", "{:.2f}"),
    "floors now": Column("new_floors", "{:.2f}"),
    "floors": Column("floors", "{:.3f}"),
    "middle half": Column("floors_half"),
    "select + rest": Column("own_s", "{:.3f}"),
    "whole step": Column("total_s", "{:.3f}"),
    "middle half of it": Column("total_s_half"),
    "bytes sent": Column("bytes_sent", "{:.3f}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add = parser.add_argument
    lengths, densities = comma_list(whole_number(2)), comma_list(to_density)
    add("--numel", type=lengths, default="11181642", metavar="D,D", help="lengths d (%(default)s: ResNet-18)")
    add("--density", type=densities, default="0.01", metavar="P,P", help="(%(default)s)")
    add("--methods", type=comma_list(str), default=[], metavar="A,B", help="names of conf/sparsifier; all by default")
    add("--nproc", type=whole_number(1, MOST_ON_A_MACHINE), default=2, help="ranks")
    add("--steps", type=whole_number(), default=15, help="measured steps, after a warm-up")
    add(
        "--limit",
        type=to_positive,
        default=7.0,
        metavar="SECONDS",
        help="approximate time limit per method, kept by fewer steps, but at least 15 (%(default)s)",
    )
    add("--against", metavar="REVISION", help="compare with another revision of the code, in alternating turns")
    add(
        "--pairs", type=whole_number(), default=7, help="with --against: turns of each, of --steps in all (%(default)s)"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print each method and then all, and write the table.

    Raises:
        UserError: no such method or revision, or a revision cannot measure a method.
        GroupError: a rank failed.
    """
    methods = select_names(arguments.methods, known_methods(), "methods")
    build_methods(methods, arguments.density[0])  # reports a mistake before ranks start
    if arguments.against is None:
        columns, title = STEP, "What a step costs"
        methods = [*methods, TOPK]
    else:
        columns, title = AGAINST, f"What a step costs: this code over {arguments.against}"
    cases = [Case(method, *place) for *place, method in product(arguments.numel, arguments.density, methods)]

    def report(frame: pd.DataFrame) -> None:
        ranks = f"{arguments.nproc} ranks; medians of steps"
        blocks = [ranks, tables.table(frame, columns)]
        arguments.benchmark = NAME if arguments.against is None else f"{NAME}-against"
        tables.write(frame, title, blocks, arguments, console)

    tables.report_rows(_measured(arguments, cases, console), report)


def _measured(arguments: argparse.Namespace, cases: list[Case], console: Console) -> Iterator[Row]:
    """Yield a row per case, and print a line for it."""
    against, sides = arguments.against, dict[str, RankGroup]()
    with ExitStack() as stack:
        if against is not None:
            tree = stack.enter_context(checked_out(against))
            sides[OLD] = stack.enter_context(measuring_ranks(arguments.nproc, code=tree))
        sides[NEW] = stack.enter_context(measuring_ranks(arguments.nproc))
        for number, case in enumerate(cases, start=1):
            try:
                turns = measure(
                    sides, case, arguments.steps, arguments.limit, num_turns=arguments.pairs if against else 1
                )
            except GroupError as error:
                if against is None:
                    raise
                raise UserError(f"the two revisions cannot both measure {case.method}: {error}") from error
            row = compared(turns) if against else medians(turns[0][NEW]) | moved(sides[NEW])
            floors = "of the floors of the other revision" if against else "floors"
            line = f"{row['floors']:.3g} {floors}, middle half {row['floors_half']}"
            console.print(f"{number} of {len(cases)}: {case.method}: {line}", highlight=False, markup=False)
            yield case._asdict() | row


def medians(steps: list[Times]) -> Row:
    """Return the medians over steps, and the middle half of the floors."""
    frame = pd.DataFrame(steps)
    halves = {"floors_half": tables.middle_half(frame["floors"].tolist()), "steps": len(frame)}
    return {**frame[list(MEDIANS)].median(), **halves}


def moved(ranks: RankGroup) -> Row:
    """Return the bytes of memory traffic of a step, on the rank with the most."""
    step_bytes, floor_bytes = (max(each) for each in zip(*ranks.call(traffic.of_this_rank), strict=True))
    return {"bytes_per_element": step_bytes, "bytes_in_floors": step_bytes / floor_bytes}


def compared(pairs: list[Turn]) -> Row:
    """Return the medians of new / old over pairs of turns, with the middle half, and of both sides' floors."""
    old, new = (
        pd.DataFrame([pd.DataFrame(turn[side])[list(RATIOS)].median() for turn in pairs]) for side in (OLD, NEW)
    )
    ratios = (new / old).where(old != 0, 1.0)
    halves = {f"{key}_half": tables.middle_half(ratios[key].tolist()) for key in RATIOS}
    return {**ratios.median(), **halves, "old_floors": old["floors"].median(), "new_floors": new["floors"].median()}
