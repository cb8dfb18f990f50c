"""Every method over thousands of steps: the laws hold at each, and nothing drifts.

    python -m tests.long_laws --steps 20000                                   all rows of the table of tests
    python -m tests.long_laws --steps 20000 --rows micro+agreed,topk+union    some of them

Gradients are drawn from one law throughout. So the residual's norm, the threshold and the density of the last quarter
are those of the quarter before it, but for ``DRIFT``. The exit code is 1 if a row failed.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from statistics import fmean

import torch

from experiments.config.command_line import Parser, comma_list, run_command
from experiments.config.errors import check_choice
from experiments.tools.shared.options import whole_number
from micro.testing import Case, assert_step, take
from tests.sparsifiers import TABLE, Row

DENSITY, WORLD_SIZE, DRIFT = 0.05, 3, 0.1
MEASURES = ("residual", "threshold", "density")
ROWS = {row.name: row for row in TABLE}

Quarters = list[list[float]]  # the means of MEASURES over each quarter of the steps


def quarters_of(row: Row, num_steps: int, seed: int = 0) -> Quarters:
    """Take so many steps and check the laws at each; raise AssertionError with the step if one fails."""
    case = Case(
        reducer=row.make(DENSITY, seed),
        promises=row.promises,
        world_size=row.world_size(WORLD_SIZE),
        dtype=torch.float32,
    )
    simulation, measured = case.simulation(), list[tuple[float, float, float]]()
    for number in range(num_steps):
        step = take(simulation, case.gradients(number))
        try:
            assert_step(row.promises, step)
        except AssertionError as error:
            raise AssertionError(f"step {number}: {error}") from error
        stats, kept = step.stats[0], float(step.after.norm()) if step.after.numel() else 0.0
        measured.append((kept, stats.threshold or 0.0, stats.global_count / stats.target_count))
    size = num_steps // 4
    return [[*map(fmean, zip(*measured[start : start + size], strict=True))] for start in range(0, 4 * size, size)]


def drifts(row: Row, quarters: Quarters) -> Iterator[str]:
    """Yield what differs between the last quarter and the one before it, and a density that is out of its band."""
    for name, before, last in zip(MEASURES, *quarters[2:], strict=True):
        if abs(last - before) > DRIFT * abs(before):
            yield f"its {name} went from {before:.4g} to {last:.4g}"
    band, density = row.promises.band, quarters[-1][-1]
    if band and not 0.99 * band.lowest <= density <= 1.01 * band.highest(row.world_size(WORLD_SIZE)):
        yield f"its density is {density:.4g} of the target"


def hold(num_steps: int, name: str) -> tuple[str, bool]:
    """Return a line about the row of this name, and whether nothing was wrong."""
    torch.set_num_threads(1)
    start, problems = time.monotonic(), list[str]()
    try:
        quarters = quarters_of(ROWS[name], num_steps)
        problems += drifts(ROWS[name], quarters)
        said = ", ".join(f"{key} {value:.4g}" for key, value in zip(MEASURES, quarters[-1], strict=True))
    except AssertionError as error:
        said = f"FAILED at {error}"
    said = f"FAILED: {'; '.join(problems)}" if problems else said
    return f"{name}, {num_steps:,} steps in {time.monotonic() - start:.0f} s: {said}", not said.startswith("FAILED")


def _run(steps: int, rows: list[str]) -> int:
    for name in rows:
        check_choice("--rows", [*ROWS], name)
    ended = list[bool]()
    spawn, left_to_the_parent = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    with spawn.Pool(len(os.sched_getaffinity(0)), signal.signal, left_to_the_parent) as pool:
        for line, holds in pool.imap_unordered(partial(hold, steps), rows):
            ended.append(holds)
            print(line, flush=True)
    print(f"{len(ended)} rows, {ended.count(False)} failed")
    return int(not all(ended))


def _parser() -> Parser:
    description, _, text = (__doc__ or "").partition("\n\n")
    parser = Parser("python -m tests.long_laws", description=description, epilog=text)
    parser.add_argument("--steps", type=whole_number(4), default=20_000, help="of each method (default: 20000)")
    parser.add_argument("--rows", type=comma_list(str), default=[*ROWS], help="of the table of tests (default: all)")
    return parser


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_command(lambda: _run(**vars(_parser().parse_args())))


if __name__ == "__main__":
    sys.exit(main())
