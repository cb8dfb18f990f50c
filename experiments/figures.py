"""Redraw every figure and table from the run folders alone: ``python -m experiments.figures``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.config.command_line import Parser, comma_list, run_command, setting
from experiments.config.errors import OutputError, UserError, check_choice
from experiments.config.option_types import to_path
from experiments.reports.names import KINDS
from experiments.reports.output import check_folder, write_or_rescue

if TYPE_CHECKING:
    from experiments.reports.frames import Frames

RUNS = Path("results/runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake, 130 after Ctrl-C."""
    return run_command(lambda: _run(parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    kinds = _kinds(options.only)
    check_folder(options.out)
    # Imported here: pandas and matplotlib take a second, which --help and a mistake need not wait for.
    from rich.console import Console

    from experiments.reports.ablation import TABLE as ABLATION
    from experiments.reports.ablation import write_ablation
    from experiments.reports.all_figures import draw_all
    from experiments.reports.earlier_rows import REACHED
    from experiments.reports.earlier_rows import read as read_earlier
    from experiments.reports.finished_runs import has_finished
    from experiments.reports.frames import Frames, load
    from experiments.reports.keep_up import TABLE as KEEP_UP
    from experiments.reports.keep_up import write_keep_up
    from experiments.reports.provenance import refuse_differences
    from experiments.reports.reached import write_reached
    from experiments.reports.run_configs import parse_selection, planned
    from experiments.reports.summary import summarise
    from experiments.reports.tables import print_tables, write_summary
    from experiments.reports.tokens import PAGES
    from experiments.sweeps.study import planned_runs
    from experiments.tracking.sources import read

    if options.allow_torn and options.source:
        raise UserError(f"--allow-torn is for run folders, not for --source {options.source[0]}: leave one out")
    if options.plan and not options.ablation:
        raise UserError(f"--plan is for --ablation, got --plan {','.join(options.plan)} without it: leave it out")
    if options.study:
        check_choice("--study", PAGES, options.study)
    if options.study and options.earlier:
        raise UserError("--earlier is not for --study, which has no table of means: give --earlier-runs alone")
    table_of_earlier = ABLATION if options.ablation else KEEP_UP if options.keep_up else REACHED
    earlier = read_earlier(options.earlier, None if options.study else options.earlier_runs, table_of_earlier)
    plan = [config for name in options.plan for config in planned(planned_runs(name))]
    selection = parse_selection(options.select)
    try:
        if options.source:
            frames = read(options.source, selection)
        else:
            roots = options.runs or [RUNS]
            is_known = options.earlier_runs is not None and not options.study
            if is_known and not any(map(has_finished, roots)):
                if options.strict:
                    raise UserError("--strict compares runs, and no finished run is at hand: leave it out")
                ignored = f"; {' '.join(options.select)} selects among runs at hand" if options.select else ""
                where = " or ".join(map(str, roots))
                print(f"no finished run in {where}: drawn from all of {options.earlier_runs}{ignored}")
                frames = Frames.of_no_runs()
            else:
                frames = load(roots, selection, allow_torn=options.allow_torn)
    except OSError as error:
        raise UserError(f"{error.filename or 'the runs'}: {error.strerror or error}") from None
    if options.strict:
        refuse_differences(frames.origins, frames.studies())
    if options.study:
        return _write_study(options.study, frames, options.earlier_runs, options.out)
    table = frames.runs if frames.runs.empty else summarise(frames)
    # A pipe has no width: wide enough that no name is cut.
    console = Console(width=None if sys.stdout.isatty() else 120)

    def write(out: Path) -> list[Path]:
        if options.ablation:
            return write_ablation(frames, out, plan=plan, earlier=earlier)
        if options.keep_up:
            return write_keep_up(frames, out, earlier=earlier)
        drawn = [] if options.table else draw_all(frames, out, kinds, earlier=earlier)
        summary = [] if table.empty else write_summary(table, out, frames.notes())
        return [*drawn, *summary, *write_reached(frames, out, earlier)]

    try:
        written = write_or_rescue(write, options.out)
    except OutputError:
        print_tables(table, console)
        raise
    for path in written:
        print(path)
    print_tables(table, console)
    for note in frames.notes():
        print(note)
    return 0


def _write_study(name: str, frames: "Frames", earlier: Path | None, out: Path) -> int:
    """Write the page of a study of language models from those of its runs that are there, or in an earlier table."""
    from experiments.reports.tokens import PAGES, joined, points, read, write_page
    from experiments.sweeps.study import planned_runs

    devices = {config.get("cluster.device") for config in frames.settings.values()}
    device = "cuda" if devices == {"cuda"} else "cpu"
    studies = (name, *PAGES[name].studies)
    plan = {run: config for study in studies for run, config in planned_runs(study, device).items()}
    found = points(frames, plan)
    if earlier:
        found = joined(read(earlier), found, plan)
    for path in write_or_rescue(lambda folder: write_page(name, found, plan, folder), out):
        print(path)
    return 0


def _kinds(given: Sequence[str]) -> list[str]:
    for word in given:
        check_choice("--only", KINDS, word)
    return list(given or KINDS)


def parser() -> Parser:
    """Return what reads the command line."""
    parser = Parser(
        prog="python -m experiments.figures",
        description="Redraw every figure (PDF, PNG and the numbers as CSV) and the summary table from finished runs.",
        epilog="example: python -m experiments.figures dataset=digits sparsifier=dense,topk,micro",
    )
    parser.add_argument(
        "--runs",
        type=to_path,
        action="append",
        metavar="DIR",
        help=f"folder of run folders ({RUNS}); give the option once for each of several",
    )
    parser.add_argument(
        "--source",
        nargs=2,
        metavar=("KIND", "WHERE"),
        help="read from elsewhere than --runs: wandb-files DIR, or wandb ENTITY/PROJECT",
    )
    parser.add_argument("--out", type=to_path, default=Path("results/figures"), help="where to write (%(default)s)")
    parser.add_argument(
        "--only", type=comma_list(str), default=[], metavar="KIND,KIND", help=f"of {', '.join(KINDS)}; all by default"
    )
    parser.add_argument(
        "--earlier",
        type=to_path,
        metavar="CSV",
        help="a reached.csv: its rows stay in the new one, and in figures of bytes, unless as many seeds are at hand; "
        "with --ablation an ablation.csv, with --keep-up a keep_up.csv",
    )
    parser.add_argument(
        "--earlier-runs",
        type=to_path,
        metavar="CSV",
        help="a reached_runs.csv: runs that are not at hand are read from it, for reached.csv and figures of bytes; "
        "with --ablation an ablation_runs.csv, with --keep-up a keep_up_runs.csv, with --study its page's *_runs.csv",
    )
    parser.add_argument("--table", action="store_true", help="only the table, no figures")
    parser.add_argument(
        "--ablation", action="store_true", help="instead, a table and figure of what each form of an ablation changes"
    )
    parser.add_argument(
        "--plan",
        type=comma_list(str),
        default=[],
        metavar="NAME,NAME",
        help="studies whose forms say what is usual, for --ablation: so a form has one name however few are at hand",
    )
    parser.add_argument(
        "--keep-up", action="store_true", help="instead, the smallest density at which each method is level with dense"
    )
    parser.add_argument(
        "--study",
        metavar="NAME",
        help="instead, the page of a study of language models: gpt_equal_tokens, gpt_under_adam, gpt_workers, "
        "gpt_rates or gpt_tuned",
    )
    parser.add_argument(
        "--allow-torn", action="store_true", help="draw what is left of damaged runs, and mark them; else none is drawn"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse runs of different code, machines, versions of torch or numbers of runs at once side by side",
    )
    parser.add_argument(
        "select",
        type=setting,
        nargs="*",
        metavar="KEY=VALUE[,VALUE]",
        help="only runs that fit: model, dataset, sparsifier, density, seed, world_size, or a key of config.yaml; "
        "dense runs fit every density",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
