"""Redraw every figure and table from the run folders alone: ``python -m experiments.figures``."""

import argparse
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.config.errors import UserError, suggestion
from experiments.reports.figures import (
    RULES,
    draw_convergence,
    draw_density,
    draw_methods,
    draw_residuals,
    draw_rules,
    draw_throughput,
    draw_times,
)
from experiments.reports.frames import EXPERIMENT, METHOD, Frames, parse_selection
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import human, label
from experiments.reports.plot_style import save
from experiments.reports.tables import markdown, of_study, print_tables, spread, stage_times, study_name, summarise
from experiments.tracking.sources import read

STUDY = EXPERIMENT[:3]  # what the rows of one table have in common
KINDS = ("convergence", "time", "density", "residual", "rules", "methods", "throughput")
SIMULATED = "simulated"  # workers that take turns in one process: their steps are not as long as those of real ones
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
            part = _part(frames, runs[dense | (runs["density"] == density)])
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


def residual_numbers(steps: pd.DataFrame) -> pd.DataFrame:
    """Per method, seed and step: residual_norm, in the steps in which it was measured; thinned to be drawn."""
    measured = steps[steps["residual_norm"].notna()]
    keys = [*METHOD, "seed", "step"]
    place = measured.groupby("run").cumcount()
    stride = place.max() // MAX_POINTS + 1 if len(measured) else 1
    return measured[place % stride == 0][[*keys, "residual_norm"]].sort_values(keys, ignore_index=True)


def throughput_numbers(frames: Frames) -> pd.DataFrame:
    """Per method and number of real workers: num_seeds, samples_per_s with its _min and _max, and efficiency.

    efficiency is samples_per_s per worker over that of the method's fewest workers. Simulated workers have no
    throughput. Empty unless runs with at least two numbers of workers are there.
    """
    real = frames.runs[frames.runs["cluster"] != SIMULATED].set_index("run")
    columns = [*METHOD, "world_size", "num_seeds", *(f"samples_per_s{end}" for end in ("", "_min", "_max"))]
    if real["world_size"].nunique() < 2:
        return pd.DataFrame(columns=[*columns, "efficiency"])
    steps_per_s = 1000 / stage_times(frames.steps)["total_ms"]
    speeds = real.assign(samples_per_s=real["world_size"] * real["batch_size"] * real["accumulate"] * steps_per_s)
    by_size = speeds.groupby([*METHOD, "world_size"])["samples_per_s"]
    rows = by_size.agg(["size", "mean", "min", "max"]).reset_index().set_axis(columns, axis=1)
    per_worker = rows["samples_per_s"] / rows["world_size"]
    return rows.assign(efficiency=per_worker / per_worker.groupby([rows[key] for key in METHOD]).transform("first"))


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


def draw_all(frames: Frames, out: Path, kinds: Collection[str] = KINDS) -> list[Path]:
    """Draw and write every figure of these kinds that the runs allow; returns the paths written.

    Raises:
        UserError: the runs allow none.
    """
    written = []
    for group in groups(frames):
        for kind, figure, numbers in _figures(group, kinds):
            written += save(figure, numbers, out / f"{kind}-{group.stem}", group.frames.runs["run"])
    if "methods" in kinds:
        written += _draw_methods(frames, out)
    if "throughput" in kinds:
        written += _draw_throughput(frames, out)
    if not written:
        raise UserError(f"these runs hold nothing to draw for {', '.join(kinds)}: choose among {', '.join(KINDS)}")
    return written


def _draw_methods(frames: Frames, out: Path) -> list[Path]:
    written = []
    for study, rows in summarise(frames).groupby(STUDY):
        if rows["sparsifier"].nunique() > 1 and (rows["density"] < 1).any():
            model, dataset, world_size = study
            figure = draw_methods(rows, metric_of(rows["metric"]), study_name(*study))
            of_this = frames.runs[(frames.runs[STUDY] == [*study]).all(axis=1)]
            stem = out / f"methods-{model}-{dataset}-n{world_size}"
            written += save(figure, of_study(rows), stem, of_this["run"])
    return written


def _draw_throughput(frames: Frames, out: Path) -> list[Path]:
    written = []
    for (model, dataset), runs in frames.runs.groupby(["model", "dataset"]):
        numbers = throughput_numbers(_part(frames, runs))
        if not numbers.empty:
            title = f"{human(str(model))} on {human(str(dataset))}: processes, the same batch on each"
            real = runs.loc[runs["cluster"] != SIMULATED, "run"]
            written += save(draw_throughput(numbers, title), numbers, out / f"throughput-{model}-{dataset}", real)
    return written


def _part(frames: Frames, runs: pd.DataFrame) -> Frames:
    """Return some of the runs, and their records."""
    return Frames(
        runs=runs,
        steps=frames.steps[frames.steps["run"].isin(runs["run"])],
        epochs=frames.epochs[frames.epochs["run"].isin(runs["run"])],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        kinds = _kinds(options.only)
        frames = read(options.source or ["folders", str(options.runs)], parse_selection(options.select))
        written = [] if options.table else draw_all(frames, options.out, kinds)
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


def _kinds(given: str) -> list[str]:
    words = [word for word in given.split(",") if word]
    for word in words:
        if word not in KINDS:
            raise UserError(f"--only must be among {', '.join(KINDS)}, got '{word}'{suggestion(word, KINDS)}")
    return words or list(KINDS)


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.figures",
        description="Redraw every figure (PDF, PNG and the numbers as CSV) and the summary table from finished runs.",
        epilog="example: python -m experiments.figures --select dataset=digits sparsifier=dense,topk,micro",
    )
    parser.add_argument("--runs", type=Path, default=Path("results/runs"), help="folder of run folders (%(default)s)")
    parser.add_argument(
        "--source",
        nargs=2,
        metavar=("KIND", "WHERE"),
        help="read from elsewhere than --runs: wandb-files DIR, or wandb ENTITY/PROJECT",
    )
    parser.add_argument("--out", type=Path, default=Path("results/figures"), help="where to write (%(default)s)")
    parser.add_argument(
        "--select",
        nargs="+",
        default=[],
        metavar="KEY=VALUE[,VALUE]",
        help="only runs that fit: model, dataset, sparsifier, density, seed, world_size, or a key of config.yaml; "
        "dense runs fit every density",
    )
    parser.add_argument("--only", default="", metavar="KIND,KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--table", action="store_true", help="only the table, no figures")
    return parser


def _figures(group: Group, kinds: Collection[str]) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    numbers = convergence_numbers(group.frames, group.metric)
    if "convergence" in kinds:
        yield "convergence", draw_convergence(numbers, group.metric, group.title), numbers
    numbers = time_numbers(group.frames)
    if "time" in kinds:
        yield "time", draw_times(numbers, group.title), numbers
    numbers = density_numbers(group.frames.steps)
    if "density" in kinds and group.density < 1 and not numbers.empty:
        yield "density", draw_density(numbers, group.title), numbers
    numbers = residual_numbers(group.frames.steps)
    if "residual" in kinds and not numbers.empty:
        yield "residual", draw_residuals(numbers, group.title), numbers
    if "rules" not in kinds:
        return
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
