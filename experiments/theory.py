"""Check the theory of top-k on the gradients of a real training: ``python -m experiments.theory``.

Trains with top-k and error feedback on simulated workers and looks at rank 0's accumulators (gradient + residual) in an
early, a middle and a late step: are they bell-shaped, does the curve of their squared magnitudes stay below its line,
does the error of top-k keep within (1 - k/d)^2, and what does each way to find the largest cost.

    python -m experiments.theory --record model=resnet20 dataset=cifar10 dataset.root=DIR --density 0.001

Source of the theory: Shi, Chu, Cheung and See, arXiv 1911.08772. Writes theory.csv, theory.md and figures.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

import micro
from experiments.config.errors import UserError
from experiments.reports.markdown import opening, table, write_csv
from experiments.reports.names import label
from experiments.reports.plot_style import save
from experiments.studies import theory_figures as drawing
from experiments.studies.method_comparison.trial import Row
from experiments.studies.methods import build_methods, known_methods
from experiments.studies.recorded_gradients import Training, training_config
from experiments.studies.selection_times import reference_times, time_selection, timing_gradient
from micro import kernels
from micro.density import check_density
from micro.planning import theory

EQUAL = "equal magnitudes"
NUM_SHARES = 200
NUM_HISTOGRAM_BINS = 81
SPAN = 8.0  # standard deviations that the histogram shows
OPERATORS = ("topk", "gaussiank", "gaussiank_published", "dgc", "sidco", "redsync", "micro")
HOW_TO_READ = """\
u is rank 0's accumulator, d its length. *mean* and *deviation* are those of the normal law fitted to it, *kurtosis* is
its excess over a normal's 0. *convex* and *below the line* say whether the curve of squared, sorted, normalised
magnitudes is as the bound assumes. *worst ratio* is the largest ||u - Top_k(u)||^2 / ||u||^2 over (1 - k/d)^2 at the
shares checked: above 1 the bound is broken, for any reason; *at k/d* is where. Equal magnitudes break the assumption,
and with it the bound.
"""


@dataclass(frozen=True, slots=True)
class Vector:
    """One accumulator: what it is called, and its values (d,)."""

    name: str
    values: Tensor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(words)
    console = Console(stderr=True)
    try:
        check_options(options)
        with console.status("training"):
            vectors = accumulators(options.record, options.world_size, options.density, options.steps)
        checks = [check(vector) for vector in [*vectors, Vector(EQUAL, torch.ones(vectors[0].values.numel()))]]
        written = write(vectors, checks, options, words)
        with console.status("timing the operators"):
            written += _write_times(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was written before stays", file=sys.stderr)
        return 130
    for row in checks:
        print(f"{row['vector']}: the bound {_verdict(row)}")
    for path in written:
        print(path)
    return 0


def accumulators(overrides: list[str], world_size: int, density: float, steps: Sequence[int]) -> list[Vector]:
    """Train with top-k and error feedback; return rank 0's gradient + residual at each of ``steps``.

    Raises:
        UserError: no such training.
    """
    training = Training(training_config(overrides, world_size))
    simulation = micro.Simulation(micro.SparseReducer(micro.TopK(), density), training.layout, world_size)
    vectors = []
    try:
        for step, rows in enumerate(training.steps(max(steps) + 1)):
            if step in steps:
                vectors.append(Vector(f"step {step}", rows[0] + simulation.residuals()[0]))
            simulation.step_(rows)
    finally:
        simulation.close()
    return vectors


def check(vector: Vector) -> Row:
    """Return the numbers of a vector: its fitted normal, its assumption, and how far its error is from the bound."""
    values, errors = vector.values.double(), error_numbers(vector)
    ratios = errors["top_k"] / errors["bound"]
    worst = int(ratios.argmax())
    deviation = float(values.std(correction=0))
    fourth = float(((values - values.mean()) ** 4).mean())
    return {
        "vector": vector.name,
        "numel": values.numel(),
        "mean": float(values.mean()),
        "deviation": deviation,
        "excess_kurtosis": fourth / deviation**4 - 3 if deviation else math.nan,
        "convex": theory.is_convex(values),
        "below_line": theory.is_below_line(values),
        "holds": bool(theory.bound_holds(values, torch.tensor(errors["share"].to_numpy())).all()),
        "worst_ratio": float(ratios.iloc[worst]),
        "worst_share": float(errors["share"].iloc[worst]),
    }


def error_numbers(vector: Vector) -> pd.DataFrame:
    """Return the errors of top-k, the bound and random-k at shares k/d from 1/d on; columns vector, share, ..."""
    numel = vector.values.numel()
    counts = sorted({round(numel**power) for power in torch.linspace(0, 1, NUM_SHARES).tolist()})
    counts = sorted({*counts, *(round(numel * part / NUM_SHARES) for part in range(1, NUM_SHARES))})
    shares = torch.tensor([k / numel for k in counts if 0 < k < numel], dtype=torch.float64)
    columns = {
        "share": shares,
        "top_k": theory.top_k_error(vector.values, shares),
        "bound": theory.top_k_bound(shares),
        "random_k": theory.random_k_error(shares),
    }
    return _frame(vector, columns)


def curve_numbers(vector: Vector) -> pd.DataFrame:
    """Return the curve of squared, sorted, normalised magnitudes, and its line; columns vector, share, ..."""
    shares, curve = theory.pi_squared(vector.values, min(vector.values.numel(), 100_000))
    places = sorted({0, *torch.logspace(0, math.log10(max(1, len(shares) - 1)), 400).long().tolist()})
    columns = {"share": shares[places], "pi_squared": curve[places], "line": theory.triangle_line(shares[places])}
    return _frame(vector, columns)


def histogram_numbers(vector: Vector) -> pd.DataFrame:
    """Return the density of values in standard deviations, and the fitted normal's; columns vector, value, ..."""
    values = vector.values.double()
    scaled = (values - values.mean()) / values.std(correction=0)
    counts, edges = torch.histogram(scaled, NUM_HISTOGRAM_BINS, range=(-SPAN, SPAN))
    centers = (edges[1:] + edges[:-1]) / 2
    fitted = [statistics.NormalDist().pdf(center) for center in centers.tolist()]
    measured = counts / (len(values) * 2 * SPAN / NUM_HISTOGRAM_BINS)
    return _frame(vector, {"value": centers, "density": measured, "normal": torch.tensor(fitted)})


def _frame(vector: Vector, columns: dict[str, Tensor]) -> pd.DataFrame:
    return pd.DataFrame({"vector": vector.name} | {name: column.numpy() for name, column in columns.items()})


def write(vectors: list[Vector], checks: list[Row], options: argparse.Namespace, words: Sequence[str]) -> list[Path]:
    """Write table, numbers and figures of the vectors; returns the paths."""
    out, numel = options.out, vectors[0].values.numel()
    title = f"accumulators under top-k, density {options.density:g}, d = {numel:,}"
    written = [write_csv(pd.DataFrame(checks), out / "theory.csv")]
    opened = opening("The theory of top-k on recorded accumulators", "experiments.theory", words, options.world_size)
    lines = [
        [
            row["vector"],
            *(f"{row[key]:.3g}" for key in ("mean", "deviation", "excess_kurtosis")),
            *("yes" if row[key] else "no" for key in ("convex", "below_line", "holds")),
            f"{row['worst_ratio']:.4g}",
            f"{row['worst_share']:.3g}",
        ]
        for row in checks
    ]
    names = ["u", "mean", "deviation", "kurtosis", "convex", "below the line", "bound holds", "worst ratio", "at k/d"]
    (out / "theory.md").write_text("\n".join([opened, HOW_TO_READ, table(names, lines), ""]))
    written.append(out / "theory.md")
    figures = (
        ("histogram", drawing.draw_histogram, histogram_numbers),
        ("pi-squared", drawing.draw_curve, curve_numbers),
        ("error", drawing.draw_errors, error_numbers),
    )
    for stem, draw, numbers_of in figures:
        numbers = pd.concat([numbers_of(vector) for vector in vectors], ignore_index=True)
        written += save(draw(numbers, title[0].upper() + title[1:]), numbers, out / stem)
    return written


def _write_times(options: argparse.Namespace) -> list[Path]:
    """Time the operators at each length, on one rank, MiCRO on its slice of one in world_size."""
    kernels.prepare()
    density, world_size, rows = options.density, options.world_size, []
    for numel in options.numel:
        gradient = timing_gradient(numel, density)
        times = reference_times(gradient, density)
        for name, reducer in build_methods([name for name in OPERATORS if name in known_methods()], density).items():
            searched = gradient[: -(-numel // world_size)] if name == "micro" else gradient
            times[name] = time_selection(reducer, searched, options.repeats)
        rows += [{"method": name, "numel": numel, "select_s": seconds} for name, seconds in times.items()]
    numbers = pd.DataFrame(rows, columns=["method", "numel", "select_s"])
    if numbers.empty:
        return []
    names = {name: label(name) for name in OPERATORS} | {"micro": f"{label('micro')}, 1/{world_size} slice"}
    title = f"Time to find the largest, one rank, density {density:g}"
    return save(drawing.draw_operators(numbers, names, title), numbers, options.out / "operators")


def _verdict(row: Row) -> str:
    how = "holds at every k/d checked" if row["holds"] else "is broken"
    return f"{how}, worst ratio {row['worst_ratio']:.4g} at k/d = {row['worst_share']:.3g}"


def check_options(options: argparse.Namespace) -> None:
    """Check the numbers of the command line. Raises: UserError."""
    for key in ("steps", "numel", "world_size", "repeats"):
        given = getattr(options, key)
        least = min(given, default=1) if isinstance(given, list) else given
        lowest = 0 if key == "steps" else 1
        if least < lowest:
            raise UserError(f"--{key.replace('_', '-')} must be at least {lowest}, got {least}")
    try:
        check_density(options.density)
    except ValueError as error:
        raise UserError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.theory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="the training, words as for experiments.train; its default model and data when none is given",
    )
    parser.add_argument("--world-size", type=int, default=4, help="simulated workers (%(default)s)")
    parser.add_argument("--density", type=float, default=0.01, help="of top-k, in (0, 1] (%(default)s)")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[5, 50, 150], help="steps to look at, from 0 (%(default)s)"
    )
    parser.add_argument(
        "--numel",
        type=int,
        nargs="*",
        default=[100_000, 1_000_000, 5_000_000, 20_000_000],
        metavar="D",
        help="lengths at which the operators are timed; none leaves it out (%(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="steps that each time is the median of (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/figures/theory"), help="folder (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
