"""How a step would go on other networks, with up to thousands of workers: ``python -m experiments.simulate``.

Puts together traces of models (``python -m experiments.profile backward``), models of networks (conf/network, or a
measured table) and schedules, and computes what a step takes: nothing is trained.

    python -m experiments.simulate --trace results/published/traces/resnet50.json --workers 4,64,1024

Writes tables (csv, simulate.md) and figures: speed-up over workers; up to which bandwidth each method is faster than
dense; the published gains of merged gradients beside ours; double trees with the published slope and the usual one.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from experiments.config.errors import UserError
from experiments.reports.markdown import write_csv
from experiments.reports.plot_style import save
from experiments.studies import simulated_steps as simulating
from experiments.studies import simulation_figures as drawing
from experiments.studies.simulated_steps import DENSE, PUBLISHED, Row
from experiments.studies.simulation_study import (
    ALGORITHMS,
    COMPUTES,
    INTRA,
    MEMORY_GB_S,
    METHODS,
    NETWORK,
    RANKS_PER_NODE,
    SCHEDULES,
    TRACES,
    WORKERS,
    Study,
    study_of,
)
from experiments.studies.simulation_tables import print_speedups, report

RATES = (1e8, 1e11)  # bits per second, 100 Mbit/s to 100 Gbit/s
TREE_SCHEDULES = ("layerwise", "single", "mgwfbp")
Frames = dict[str, pd.DataFrame]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        options = parser().parse_args(words)
        study = study_of(options)
        frames = compute(study, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    print_speedups(frames["steps"], console)
    for path in write(study, frames, options.out, shlex.join(["python", "-m", "experiments.simulate", *words])):
        console.print(str(path), soft_wrap=True)
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Check what the command line asks for: the methods, schedules, traces and networks. Raises: UserError."""
    study_of(options)


def compute(study: Study, console: Console) -> Frames:
    """Return a frame of rows for each question, those without rows left out, and say how long each took."""
    questions = {"steps": _steps, "borders": _borders, "headline": _headline, "trees": _trees}
    frames = {}
    for name, answer in questions.items():
        begun = time.perf_counter()
        frame = pd.DataFrame(list(answer(study)))
        if not frame.empty:
            frames[name] = frame
            console.print(f"{name}: {len(frame)} rows in {time.perf_counter() - begun:.1f} s")
    return frames


def write(study: Study, frames: Frames, out: Path, command: str) -> list[Path]:
    """Write tables and figures; returns the paths."""
    written = [write_csv(frames["steps"], out / "steps.csv")]
    for (network, algorithm), rows in frames["steps"].groupby(["network", "algorithm"], sort=False):
        shown = rows[(rows["method"] == DENSE) | (rows["schedule"] == simulating.EXACT)]
        heading = f"Simulated speed-up, {network}, {algorithm}, density {study.density:g}"
        stem = f"speedup-{network}-{algorithm}"
        written += save(drawing.draw_speedups(shown, heading), shown, out / stem)
    if "borders" in frames:
        heading = f"Left of its line a method is faster than dense: ring, density {study.density:g}"
        written += save(drawing.draw_borders(frames["borders"], heading, RATES), frames["borders"], out / "borders")
    if "headline" in frames:
        heading = "Step of other schedules / step of MG-WFBP at 64 workers, beside the published"
        written += save(drawing.draw_headline(frames["headline"], heading), frames["headline"], out / "headline")
    heading = "Double trees on the link of k80_10gbe"
    written += save(drawing.draw_trees(frames["trees"], heading), frames["trees"], out / "double-trees")
    written.append(out / "simulate.md")
    written[-1].write_text(report(study, frames, command))
    return written


def _steps(study: Study) -> Iterator[Row]:
    for trace in study.traces:
        for network in study.networks:
            facts: Row = {"model": trace.model, "network": network.name, "algorithm": network.algorithm}
            for row in simulating.speedups(trace, network.of, study.methods, study.ways, network.workers):
                yield facts | {"compute_s": trace.compute_s} | row


def _borders(study: Study) -> Iterator[Row]:
    link, workers = simulating.cluster_link(), [count for count in study.workers if count > 1]
    for trace in study.traces:
        for row in simulating.borders(trace, link, study.methods, workers, RATES):
            yield {"model": trace.model} | row


def _headline(study: Study) -> Iterator[Row]:
    for trace in study.recorded:
        if trace.model in PUBLISHED:
            said = PUBLISHED[trace.model]
            facts = {"model": trace.model, "said_layerwise": said.over_layerwise, "said_single": said.over_single}
            for row in simulating.headline(trace, COMPUTES):
                yield facts | row


def _trees(study: Study) -> Iterator[Row]:
    for trace in study.traces:
        for row in simulating.trees(trace, TREE_SCHEDULES, study.workers):
            yield {"model": trace.model} | row


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        nargs="+",
        default=list(TRACES),
        metavar="FILE",
        help="of models; the published by default",
    )
    add(
        "--network",
        nargs="+",
        default=[NETWORK],
        metavar="NAME_OR_FILE",
        help="of conf/network, a yaml like those, or a table (json) of experiments.profile link, for its own number "
        f"of workers only ({NETWORK})",
    )
    add(
        "--algorithm",
        default="",
        metavar="A,B",
        help=f"of the all-reduce, among {', '.join(ALGORITHMS)}; hierarchical: the network joins nodes; best: call by "
        "call the fastest of the flat ones; each network's own by default",
    )
    add("--ranks-per-node", type=int, metavar="G", help=f"with hierarchical; fewer are one node ({RANKS_PER_NODE})")
    add("--intra", metavar="NAME_OR_FILE", help=f"with hierarchical: network within a node ({INTRA})")
    add("--workers", default=WORKERS, metavar="N,N", help="numbers of workers (%(default)s)")
    add("--schedules", default=SCHEDULES, metavar="A,B", help="of the dense method (%(default)s)")
    add("--methods", default=METHODS, metavar="A,B", help="names of conf/sparsifier (%(default)s)")
    add("--density", type=float, default=0.001, help="of sparse methods, in (0, 1] (%(default)s)")
    add("--grain", choices=list(simulating.GRAINS), default="layer", help="what a group is made of (%(default)s)")
    add("--select", type=Path, metavar="FILE", help="table of experiments.profile select; a formula by default")
    add(
        "--memory-gb-s",
        type=float,
        default=MEMORY_GB_S,
        help="bandwidth of memory in that formula, in GB/s; the default is an assumption of ours, neither measured nor "
        "published (%(default)s)",
    )
    add(
        "--compute-s",
        default="published",
        metavar="SECONDS",
        help="what a step without communication takes, the trace's proportions kept; 'trace': as it was measured; "
        "'published', the default: what brings our gains of merged gradients nearest to the published ones, and as "
        "measured where none are",
    )
    add("--out", type=Path, default=Path("results/simulate"), help="folder (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
