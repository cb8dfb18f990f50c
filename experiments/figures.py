"""Redraw every figure and table from the run folders alone: ``python -m experiments.figures``."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.harness.drawing import RULES, draw_convergence, draw_density, draw_methods, draw_rules, draw_times
from experiments.harness.errors import UserError
from experiments.harness.frames import METHOD, Frames, load, parse_selection
from experiments.harness.metrics import Metric, metric_of
from experiments.harness.plotting import human, label, save
from experiments.harness.tables import markdown, of_study, print_tables, spread, stage_times, study_name, summarise

MAX_POINTS = 400  # of one line; more cannot be seen and makes the PDF heavy


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The runs that one figure compares: one model, data set, number of workers and density."""

    model: str
    dataset: str
    world_size: int
    density: float
    frames: Frames

    @property
    def metric(self) -> Metric:
        """What its runs are measured by."""
        return metric_of(self.frames.epochs["metric"])

    @property
    def title(self) -> str:
        """What the runs have in common."""
        clusters = " and ".join(sorted(self.frames.runs["cluster"].unique()))
        workers = f"{self.world_size} workers ({clusters})" if self.world_size > 1 else "1 worker"
        return f"{human(self.model)} on {human(self.dataset)}, {workers}, density\N{NO-BREAK SPACE}{self.density:g}"

    @property
    def stem(self) -> str:
        """What the runs have in common, as part of a file name."""
        return re.sub(r"[^\w.-]", "_", f"{self.model}-{self.dataset}-n{self.world_size}-d{self.density:g}")


def groups(frames: Frames) -> Iterator[Group]:
    """Split the runs by figure; a dense run, the baseline, is in the figures of every density."""
    for (model, dataset, world_size), runs in frames.runs.groupby(["model", "dataset", "world_size"]):
        dense = runs["sparsifier"] == "dense"
        densities = sorted(runs.loc[~dense, "density"].unique()) or [1.0]
        for density in densities:
            kept = runs[dense | (runs["density"] == density)]
            part = Frames(
                runs=kept,
                steps=frames.steps[frames.steps["run"].isin(kept["run"])],
                epochs=frames.epochs[frames.epochs["run"].isin(kept["run"])],
            )
            yield Group(
                model=str(model), dataset=str(dataset), world_size=int(str(world_size)), density=density, frames=part
            )


def convergence_numbers(frames: Frames, metric: Metric) -> pd.DataFrame:
    """Per method and epoch: num_seeds, mean step, time_s and total_bytes, and the ``spread`` of the measure.

    total_bytes is what a worker sent until then.
    """
    by_epoch = _with_total_bytes(frames).groupby([*METHOD, "epoch"])
    means = by_epoch[["step", "time_s", "total_bytes"]].mean()
    means.insert(0, "num_seeds", by_epoch.size())
    return means.join(spread(by_epoch[[metric.key]])).reset_index()


def density_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per sparse method, seed and step: target_density, density and density_error, smoothed and thinned to be drawn."""
    sparse = steps[(steps["sparsifier"] != "dense") & ~steps["skipped"]]
    lines = [_drawable(run, ["density", "density_error"]) for _, run in sparse.groupby("run")]
    columns = [*METHOD, "seed", "step", "target_density", "density", "density_error"]
    return pd.concat(lines)[columns].sort_values(columns[:4], ignore_index=True) if lines else sparse[columns]


def time_numbers(frames: Frames) -> pd.DataFrame:
    """Per method: num_seeds and the mean over seeds of ``stage_times``."""
    times = frames.runs.set_index("run")[METHOD].join(stage_times(frames.steps)).groupby(METHOD)
    means = times.mean()
    means.insert(0, "num_seeds", times.size())
    return means.reset_index()


def rule_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """What ``draw_rules`` takes, plus the method, of the runs that name their rule; smoothed and thinned."""
    ruled = steps[steps["rule"].notna() & ~steps["skipped"]]
    lines = [_drawable(run, ["density", "threshold"]) for _, run in ruled.groupby("run")]
    if not lines:
        return ruled.assign(method="", stream="")
    rows = pd.concat(lines)
    variants = rows["variant"].map(lambda variant: f", {variant}" if variant else "")
    named = rows.assign(
        method=rows["sparsifier"].str.replace(f"_({'|'.join(RULES)})$", "", regex=True),
        stream="seed " + rows["seed"].astype(str) + variants,
    )
    keys = ["method", "rule", "stream", "step"]
    columns = [*keys, "target_density", "density", "threshold"]
    return named.drop_duplicates(keys)[columns].sort_values(keys, ignore_index=True)


def draw_all(frames: Frames, out: Path) -> list[Path]:
    """Draw and write every figure the runs allow; returns the paths written."""
    written = []
    for group in groups(frames):
        for kind, figure, numbers in _figures(group):
            written += save(figure, numbers, out / f"{kind}-{group.stem}")
    for (model, dataset, world_size), rows in summarise(frames).groupby(["model", "dataset", "world_size"]):
        if rows["sparsifier"].nunique() > 1 and (rows["density"] < 1).any():
            figure = draw_methods(rows, metric_of(rows["metric"]), study_name(model, dataset, world_size))
            written += save(figure, of_study(rows), out / f"methods-{model}-{dataset}-n{world_size}")
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        frames = load(options.runs, parse_selection(options.select))
        written = [] if options.table else draw_all(frames, options.out)
        table = summarise(frames)
        written += _write_summary(table, options.out)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in written:
        print(path)
    # A pipe has no width: wide enough that no name is cut.
    print_tables(table, Console(width=None if sys.stdout.isatty() else 120))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.figures",
        description="Redraw every figure (PDF, PNG and the numbers as CSV) and the summary table from finished runs.",
        epilog="example: python -m experiments.figures --select dataset=digits sparsifier=dense,topk,micro",
    )
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="folder of run folders (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/figures"), help="where to write (%(default)s)")
    parser.add_argument(
        "--select",
        nargs="+",
        default=[],
        metavar="KEY=VALUE[,VALUE]",
        help="only runs that fit: model, dataset, sparsifier, density, seed, world_size, or a key of config.yaml; "
        "dense runs fit every density",
    )
    parser.add_argument("--table", action="store_true", help="only the table, no figures")
    return parser


def _figures(group: Group) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    numbers = convergence_numbers(group.frames, group.metric)
    yield "convergence", draw_convergence(numbers, group.metric, group.title), numbers
    numbers = time_numbers(group.frames)
    yield "time", draw_times(numbers, group.title), numbers
    numbers = density_numbers(group.frames.steps)
    if not numbers.empty:
        yield "density", draw_density(numbers, group.title), numbers
    for method, rows in rule_numbers(group.frames.steps).groupby("method"):
        if rows["rule"].nunique() > 1:
            yield f"rules-{method}", draw_rules(rows, f"{label(str(method))}: {group.title}"), rows


def _write_summary(table: pd.DataFrame, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "summary.csv", index=False, float_format="%.8g", lineterminator="\n")
    (out / "summary.md").write_text(markdown(table))
    return [out / "summary.csv", out / "summary.md"]


def _with_total_bytes(frames: Frames) -> pd.DataFrame:
    """The epochs, and what rank 0 had sent after the steps done by the end of each."""
    done = frames.steps["step"] + 1.0
    total = frames.steps.groupby("run")["bytes_sent"].cumsum()
    sent = frames.steps[["run"]].assign(step=done, total_bytes=total).sort_values("step")
    return pd.merge_asof(frames.epochs.sort_values("step"), sent, on="step", by="run")


def _drawable(run: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Smooth ``columns`` by a running median over a hundredth of the run; keep at most MAX_POINTS steps."""
    window = len(run) // 100 | 1  # odd: centred on its step
    smooth = run[columns].rolling(window, center=True, min_periods=1).median()
    stride = run["step"].max() // MAX_POINTS + 1
    return run.assign(**smooth)[run["step"] % stride == 0]  # by step, so that seeds keep the same ones


if __name__ == "__main__":
    sys.exit(main())
