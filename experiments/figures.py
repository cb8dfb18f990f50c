"""Redraw all figures and tables from run folders: ``python -m experiments.figures``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.config.command_line import Parser, add_out, comma_list, run_command, setting, to_path
from experiments.config.errors import UserError, check_choice
from experiments.reports.names import KINDS
from experiments.runs.files import check_folder

RUNS = Path("results/runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for a mistake, 130 after Ctrl-C."""
    return run_command(lambda: _run(parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    for word in options.only:
        check_choice("--only", KINDS, word)
    check_folder(options.out)
    # Imported here: pandas and matplotlib take a second, which --help and a mistake need not wait for.
    from rich.console import Console

    from experiments.reports.frames import load
    from experiments.reports.pages import print_summary, unlike, write_summary
    from experiments.reports.run_configs import parse_selection
    from experiments.reports.run_figures import draw_all
    from experiments.tracking.sources import read

    selection = parse_selection(options.select)
    try:
        frames = read(options.source, selection) if options.source else load(options.runs or [RUNS], selection)
    except OSError as error:
        raise UserError(f"{error.filename or 'the runs'}: {error.strerror or error}") from None
    if options.strict and (lines := unlike(frames.runs)):
        raise UserError(f"runs side by side are of {'; '.join(lines)}: leave some out, or leave out --strict")
    # A pipe has no width: use one that cuts no names.
    console = Console(width=None if sys.stdout.isatty() else 120)

    try:
        for path in [
            *([] if options.table else draw_all(frames, options.out, options.only or KINDS, options.links)),
            *write_summary(frames, options.out),
        ]:
            print(path)
    finally:
        print_summary(frames, console)
    return 0


def parser() -> Parser:
    """Return the parser of the command line."""
    description = "Redraw every figure (PDF, PNG and the numbers as CSV) and the summary table from finished runs."
    epilog = "example: python -m experiments.figures dataset=digits sparsifier=dense,topk,micro"
    parser = Parser("experiments.figures", description=description, epilog=epilog)
    add, help = parser.add_argument, f"folder of run folders ({RUNS}); give the option once for each of several"
    add("--runs", type=to_path, action="append", metavar="DIR", help=help)
    help = "read from elsewhere than --runs: wandb ENTITY/PROJECT"
    add("--source", nargs=2, metavar=("KIND", "WHERE"), help=help)
    add_out(parser, "results/figures")
    help = f"of {', '.join(KINDS)}; all by default"
    add("--only", type=comma_list(str), default=[], metavar="KIND,KIND", help=help)
    help = "of conf/networks.yaml: on which simulated workers' training time is drawn (%(default)s)"
    add("--links", type=comma_list(str), default="ethernet_1gbit,ethernet_10gbit", metavar="NAME,NAME", help=help)
    add("--table", action="store_true", help="only the table, no figures")
    help = "refuse runs of different code, machines, versions of torch or numbers of runs at once side by side"
    add("--strict", action="store_true", help=help)
    help = "only runs that fit: model, dataset, sparsifier, density, seed, world_size, or a key of config.yaml; "
    help += "dense runs fit every density"
    add("select", type=setting, nargs="*", metavar="KEY=VALUE[,VALUE]", help=help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
