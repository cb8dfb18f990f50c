"""Run every method on the same gradients and compare: ``python -m experiments.compare``.

Methods are those of conf/sparsifier, built as training builds them, on simulated ranks. The gradients are drawn from
known laws, or recorded from a real training (the stream `recorded`; --record takes words of experiments.train).

    python -m experiments.compare --methods topk,cltk,micro --streams normal recorded --world-sizes 4 16
    python -m experiments.compare --record model=resnet20 dataset=cifar10 dataset.root=DIR --max-gb 8

Writes compare.csv (a row per method, stream and number of workers), compare.md and figures; after Ctrl-C, of what is
done so far.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import Progress

import micro
from experiments.config.errors import UserError
from experiments.reports.markdown import opening, table, write_csv
from experiments.reports.names import in_order, label
from experiments.reports.plot_style import save
from experiments.studies import comparison_figures as drawing
from experiments.studies.equal_bytes import match_bytes
from experiments.studies.gradient_sources import RECORDED, SHAPES, TITLES, Gradients, synthetic
from experiments.studies.method_comparison import (
    Row,
    build_methods,
    chosen,
    known_methods,
    reference_times,
    time_selection,
    timing_gradient,
    trial,
)
from experiments.studies.recorded_gradients import record
from micro import kernels
from micro.density import check_density

SHOWN_AT = 16  # workers of the figures that show one number of them, where it is among those asked for
HOW_TO_READ = """\
Every method gets the same gradients on simulated ranks. Drawn gradients have the scale at which the threshold
1 / (2 sqrt k) selects about k normal values; recorded ones are a dense training's. *density / asked* is what the update
holds over what was asked for, a mean over steps; *error* its distance from 1, *worst* the largest after 20 steps (after
half of fewer than 40). *sent* is bytes per rank and step over those of a dense all-reduce, of which *indices* and
*values*. *one update* is ||update - mean|| / ||mean|| of the gradients, *all updates* the same of the sums of all steps
up to the last; where the feedback corrects momentum, the mean is that of velocities. *mass kept* is the worst step's
1 - ||sum acc - sum residual - n update||_1 / ||sum acc||_1: below 1, something was neither sent nor kept. *selection*
is the fastest rank's time to choose indices, in times of torch.topk on the whole vector; ranks share the machine's
cores, so it is an upper bound (selection.pdf shows one rank alone). Where a
density policy counts epochs, one is one step here. Methods that choose nothing are left out of selection.pdf.
"""
COLUMNS = [
    ("density / asked", "build_up", "{:.3g}"),
    ("error", "density_error", "{:.2g}"),
    ("worst", "worst_density_error", "{:.2g}"),
    ("imbalance", "imbalance", "{:.2g}"),
    ("sent", "bytes_share", "{:.3g}"),
    ("indices", "indices_share", "{:.2g}"),
    ("values", "values_share", "{:.2g}"),
    ("one update", "step_error", "{:.3g}"),
    ("all updates", "cumulative_error", "{:.3g}"),
    ("mass kept", "mass_kept", "{:.4f}"),
    ("selection", "select_topks", "{:.2g}"),
]


@dataclass(slots=True)
class Comparison:
    """What was measured so far.

    Attributes:
        rows: one per method, stream and world size.
        steps: one per step of these.
        times: of selection, one per method and length.
        tradeoffs: rows like those above, of further densities.
        matches: densities at which methods send as much as another one.
        failures: what went wrong, one line each.
        interrupted: the user stopped it.
    """

    rows: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    times: list[Row] = field(default_factory=list)
    matches: list[Row] = field(default_factory=list)
    tradeoffs: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake, 1 where a method failed, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(words)
    try:
        check_options(options)
        comparison = measure(options, build_methods(options.methods, options.density))
        written = write(comparison, options, words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in [*map(str, written), *comparison.failures]:
        print(line)
    return 130 if comparison.interrupted else int(bool(comparison.failures))


def measure(options: argparse.Namespace, methods: dict[str, micro.Reducer]) -> Comparison:
    """Run all methods on all streams and world sizes, and time their selection; Ctrl-C ends it early."""
    done = Comparison()
    kernels.prepare()
    total = len(options.streams) * len(options.world_sizes) * len(methods)
    total += len(options.densities) * len(methods)
    total += (len(options.select_numel) + bool(options.equal_bytes)) * len(methods)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        try:
            for what in _parts(options, methods, done):
                progress.update(bar, description=what, advance=1)
        except KeyboardInterrupt:
            done.interrupted = True
    return done


def _parts(options: argparse.Namespace, methods: dict[str, micro.Reducer], done: Comparison) -> Iterator[str]:
    """Do one part of the work after the other; yield its name."""
    for stream in options.streams:
        gradients = _gradients(stream, options)
        for world_size in options.world_sizes:
            for name, reducer in methods.items():
                what = f"{name} on {TITLES[stream]} gradients, {world_size} workers"
                with _guarded(what, done):
                    row, steps = trial(name, reducer, gradients, world_size)
                    done.rows.append(row)
                    done.steps += steps
                yield what
        if stream == options.streams[-1]:
            yield from _tradeoffs(options, gradients, done)
            if options.equal_bytes:
                yield from _matches(options, gradients, done)
    for numel in options.select_numel:
        gradient = timing_gradient(numel, options.density)
        done.times += [
            {"method": name, "numel": numel, "select_s": seconds}
            for name, seconds in reference_times(gradient, options.density).items()
        ]
        for name, reducer in methods.items():
            what = f"selection of {name}, d = {numel:,}"
            with _guarded(what, done):
                seconds = time_selection(reducer, gradient, options.repeats)
                done.times.append({"method": name, "numel": numel, "select_s": seconds})
            yield what


def _tradeoffs(options: argparse.Namespace, gradients: Gradients, done: Comparison) -> Iterator[str]:
    """Run all methods at the further densities, with as many workers as the figures show."""
    for density in options.densities:
        for name, reducer in build_methods(options.methods, density).items():
            what = f"{name} at density {density:g}"
            with _guarded(what, done):
                done.tradeoffs.append(trial(name, reducer, gradients, _shown(options.world_sizes))[0])
            yield what


def _matches(options: argparse.Namespace, gradients: Gradients, done: Comparison) -> Iterator[str]:
    """Find for each method the density at which it sends what the one named sends at the density asked for."""
    world_size = _shown(options.world_sizes)
    (reducer,) = build_methods([options.equal_bytes], options.density).values()
    row, _ = trial(options.equal_bytes, reducer, gradients, world_size)
    for name in options.methods:
        what = f"{name} with the bytes of {options.equal_bytes}"
        with _guarded(what, done):
            found = match_bytes([name], row["bytes_share"], options.density, gradients, world_size)
            done.matches += [asdict(match) for match in found]
        yield what


def _shown(world_sizes: Sequence[int]) -> int:
    """Return the number of workers that figures of one number show."""
    return SHOWN_AT if SHOWN_AT in world_sizes else max(world_sizes)


@contextmanager
def _guarded(what: str, done: Comparison) -> Iterator[None]:
    """Note a failure and go on: that of one method must not cost the others' results."""
    try:
        yield
    except Exception as error:
        done.failures.append(f"failed: {what}: {type(error).__name__}: {error}")


def _gradients(stream: str, options: argparse.Namespace) -> Gradients:
    world_size = max(options.world_sizes)
    if stream == RECORDED:
        return record(options.record, num_steps=options.steps, world_size=world_size, max_gb=options.max_gb)
    return synthetic(
        stream,
        numel=options.numel,
        num_steps=options.steps,
        world_size=world_size,
        density=options.density,
        seed=options.seed,
        max_gb=options.max_gb,
    )


def write(done: Comparison, options: argparse.Namespace, words: Sequence[str]) -> list[Path]:
    """Write the numbers, the table and the figures; returns their paths."""
    out, written = options.out, []
    title = f"density {options.density:g}"
    if done.rows:
        numbers, steps = _numbered(done.rows), pd.DataFrame(done.steps)
        shown = _shown([int(n) for n in numbers["world_size"].unique()])
        written += [write_csv(numbers, out / "compare.csv"), _write_report(done, numbers, shown, options, words)]
        written += _draw(numbers, steps[steps["world_size"] == shown], shown, title, out)
        written += _draw_tradeoff(numbers[numbers["world_size"] == shown], done, out)
    times = pd.DataFrame(done.times, columns=["method", "numel", "select_s"])
    selecting = times[times["select_s"] > 0]
    if len(set(selecting["method"]) - set(drawing.REFERENCES)):
        written += save(
            drawing.draw_selection_times(selecting, f"Selection on one rank, {title}"), times, out / "selection"
        )
    return written


def _draw(numbers: pd.DataFrame, steps: pd.DataFrame, shown: int, title: str, out: Path) -> list[Path]:
    written = []
    sparse = _sparse(numbers)
    kept = steps[steps["method"].isin(sparse["method"])]
    if not kept.empty:
        drawn = kept[["method", "stream", "world_size", "step", "target_density", "density", "build_up"]]
        figure = drawing.draw_density_steps(drawn, f"Density over steps, {shown} workers, {title}")
        written += save(figure, drawn, out / "density")
        figure = drawing.draw_build_up(sparse, f"Build-up over workers, {title}")
        written += save(figure, sparse[["method", "stream", "world_size", "build_up"]], out / "build-up")
        sent = volumes(sparse)
        if not sent.empty:
            written += save(drawing.draw_volume(sent, f"Volume over workers, {title}"), sent, out / "volume")
    for stream, rows in numbers[numbers["world_size"] == shown].groupby("stream", sort=False):
        if not (rows["bytes_share"] > 0).any():
            continue  # one worker sends nothing
        text = f"Error and bytes on {TITLES[str(stream)]} gradients, {shown} workers, {title}"
        columns = ["method", "stream", "world_size", "bytes_share", "step_error", "cumulative_error"]
        written += save(drawing.draw_front(rows, text), rows[columns], out / f"front-{stream}")
    return written


def volumes(numbers: pd.DataFrame) -> pd.DataFrame:
    """Bytes that a worker sent in a step, and how many values of four bytes they are per index asked for."""
    sending = numbers[numbers["bytes_share"] > 0]
    dense_bytes = 2 * 4 * sending["numel"] * (sending["world_size"] - 1) / sending["world_size"]
    sent = sending["bytes_share"] * dense_bytes
    words = sent / (4 * sending["density"] * sending["numel"])
    return sending[["method", "stream", "world_size"]].assign(bytes_sent=sent, words_per_k=words)


def _draw_tradeoff(shown: pd.DataFrame, done: Comparison, out: Path) -> list[Path]:
    """Draw error over compression where further densities were run."""
    if not done.tradeoffs:
        return []
    further = pd.DataFrame(done.tradeoffs)
    stream = further["stream"].iloc[0]
    rows = pd.concat([shown[shown["stream"] == stream], further], ignore_index=True)
    rows = rows[rows["bytes_share"] > 0].assign(compression=1 / rows["bytes_share"])
    columns = ["method", "stream", "world_size", "density", "compression", "step_error", "cumulative_error"]
    numbers = rows[columns].drop_duplicates(["method", "density"]).sort_values(["method", "density"], ignore_index=True)
    title = f"Error and compression on {TITLES[str(stream)]} gradients, {rows['world_size'].iloc[0]} workers"
    return save(drawing.draw_tradeoff(numbers, title), numbers, out / "tradeoff")


def _sparse(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of methods that leave something out: others have no density to be wrong about."""
    return numbers[numbers.groupby("method")["density"].transform("min") < 1]


def _numbered(rows: list[Row]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    order = {method: place for place, method in enumerate(in_order(frame["method"]))}
    return frame.sort_values(
        "method", key=lambda names: names.map(order), kind="stable", ignore_index=True
    ).sort_values(["stream", "world_size"], key=_place, kind="stable", ignore_index=True)


def _place(column: pd.Series) -> pd.Series:
    return column.map(list(TITLES).index) if column.name == "stream" else column


def _write_report(
    done: Comparison, numbers: pd.DataFrame, shown: int, options: argparse.Namespace, words: Sequence[str]
) -> Path:
    parts = [opening("All methods on the same gradients", "experiments.compare", words, max(options.world_sizes))]
    parts.append(HOW_TO_READ)
    whole = [label(name) for name in in_order(numbers["method"]) if name not in set(_sparse(numbers)["method"])]
    if whole:
        parts.append(f"Send every element, so they are left out of the figures of density: {', '.join(whole)}.\n")
    if done.interrupted:
        parts.append("Stopped by the user before its end: what is missing was not run.\n")
    parts += [f"{line}\n" for line in done.failures]
    for stream, rows in numbers[numbers["world_size"] == shown].groupby("stream", sort=False):
        first = rows.iloc[0]
        about = f"d = {first['numel']:,}, {shown} workers, density {options.density:g}, {first['steps']} steps"
        best = {error: drawing.front_methods(rows, error) for error in ("step_error", "cumulative_error")}
        fronts = "; ".join(
            f"of {name}: {', '.join(map(label, best[error]))}"
            for error, name in (("step_error", "one update"), ("cumulative_error", "all updates"))
        )
        lines = [
            [label(row["method"]), *(show.format(row[key]) for _, key, show in COLUMNS)] for _, row in rows.iterrows()
        ]
        parts.append(f"## {TITLES[str(stream)]}: {about}\n")
        parts.append(f"On the front, least bytes first, {fronts}.\n")
        parts.append(table(["method", *(name for name, _, _ in COLUMNS)], lines) + "\n")
    if done.matches:
        lines = [[label(m["method"]), f"{m['density']:.4g}", f"{m['bytes_share']:.3g}"] for m in done.matches]
        asked = f"{label(options.equal_bytes)} at density {options.density:g}, {shown} workers"
        parts.append(f"## Equal bytes: as many as {asked}\n")
        parts.append(table(["method", "density", "sent"], lines) + "\n")
    path = options.out / "compare.md"
    path.write_text("\n".join(parts))
    return Path(path)


def check_options(options: argparse.Namespace) -> None:
    """Check what the command line asks for, and bring its lists into order. Raises: UserError."""
    options.methods = chosen([name for name in options.methods.split(",") if name], known_methods(), "methods")
    options.streams = chosen(options.streams, list(TITLES), "streams")
    if options.equal_bytes:
        chosen([options.equal_bytes], known_methods(), "--equal-bytes")
    options.world_sizes = sorted(set(options.world_sizes))
    for key in ("numel", "steps", "repeats"):
        if getattr(options, key) < 1:
            raise UserError(f"--{key} must be at least 1, got {getattr(options, key)}")
    for key in ("world_sizes", "select_numel"):
        if min(getattr(options, key), default=1) < 1:
            raise UserError(f"--{key.replace('_', '-')} must be at least 1, got {min(getattr(options, key))}")
    options.densities = [density for density in options.densities if density != options.density]
    try:
        for density in [options.density, *options.densities]:
            check_density(density)
    except ValueError as error:
        raise UserError(str(error)) from None
    build_methods(options.methods, options.density)


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="", metavar="A,B", help="names of conf/sparsifier; all by default")
    parser.add_argument(
        "--streams", nargs="+", default=[], metavar="STREAM", help=f"{', '.join([*SHAPES, RECORDED])}; all by default"
    )
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], metavar="N")
    parser.add_argument("--density", type=float, default=0.01, help="share asked for, in (0, 1] (%(default)s)")
    parser.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[],
        metavar="P",
        help="further ones, for error over compression on the last stream",
    )
    parser.add_argument(
        "--equal-bytes",
        metavar="METHOD",
        help="find densities at which all send what this one does, on the last stream",
    )
    parser.add_argument("--numel", type=int, default=50_000, help="length d of drawn gradients (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of drawn gradients (%(default)s)")
    parser.add_argument(
        "--record",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="the training to record, words as for experiments.train; its default model and data when none is given",
    )
    parser.add_argument(
        "--select-numel",
        type=int,
        nargs="*",
        default=[100_000, 1_000_000, 5_000_000, 20_000_000],
        metavar="D",
        help="lengths at which selection is timed on one rank; none leaves it out (%(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="steps that each time is the median of (%(default)s)")
    parser.add_argument("--max-gb", type=float, default=1.0, help="memory that gradients may take (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/figures/compare"), help="folder (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
