"""Write the pages of published runs from one table of runs: ``python -m experiments.pages``."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.config import ROOT
from experiments.config.command_line import Parser, run_command, to_path
from experiments.config.errors import check_choice
from experiments.runs.files import check_folder

TEXTS, IMAGES, FIGURES = ROOT / "results/published", ROOT / "docs/images", Path("results/figures/pages")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for a mistake, 130 after Ctrl-C."""
    return run_command(lambda: _run(parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    out = options.out or FIGURES
    check_folder(out)
    # Imported here: pandas and matplotlib take a second, which --help and a mistake need not wait for.
    from experiments.reports.pages import load_page, page_names, write_page
    from experiments.reports.table import FOLDER, add, read

    for name in options.pages:
        check_choice("page", page_names(), name)
    pages = [load_page(name) for name in options.pages or page_names()]
    if options.runs:
        from experiments.reports.finished_runs import in_folders
        from experiments.reports.published_runs import finished_rows
        from experiments.sweeps.study import parts_of, planned_runs, studies

        for folder in options.runs:
            in_folders(folder)  # reports a mistake before all studies are composed, which takes a while
        plans = {part: planned_runs(part) for study in studies() for part in parts_of(study)}
        for path in add(finished_rows(options.runs, [load_page(name) for name in page_names()], plans)):
            print(path)
    table = read(FOLDER)
    for page in pages:
        for path in write_page(page, table, options.out or TEXTS, out):
            print(path)
            if not options.out and path.suffix == ".png":
                shutil.copy(path, IMAGES)
    return 0


def parser() -> Parser:
    """Return the parser of the command line."""
    description = "Write pages of conf/page and their figures from the table of runs in results/published/runs."
    epilog = "example: python -m experiments.pages long --runs results/study"
    parser = Parser("experiments.pages", description=description, epilog=epilog)
    add = parser.add_argument
    add("pages", nargs="*", metavar="PAGE", help="names of conf/page; all by default")
    help = "first add to the table the finished runs in this folder that belong to a study of some page"
    add("--runs", type=to_path, action="append", metavar="DIR", help=help)
    add("--out", type=to_path, help="write texts and figures here, and leave the published ones as they are")
    return parser


if __name__ == "__main__":
    sys.exit(main())
