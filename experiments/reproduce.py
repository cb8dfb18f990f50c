"""Run a paper's study and draw its figures: ``python -m experiments.reproduce PAPER --scale small|medium|paper``.

A paper is a file of conf/paper with a list of commands for each scale: for a laptop (small), for small models on real
data until they have converged (medium), and as published (paper). Finished runs are kept. Tables and figures are made
again when their command, inputs or code changed, or their folder was removed. A failed part ends the command. Results
are collected in one page, page.md, and index.html for a browser, in a folder with the figures.

    python -m experiments.reproduce micro --scale small
    python -m experiments.reproduce oktopk --scale paper --root DATA cluster=local
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.config.command_line import FAILED, Parser, add_settings, print_error, run_command, to_path
from experiments.config.errors import UserError
from experiments.runs.files import check_folder, writing
from experiments.tools.reproduce.paper_page import write_paper_page
from experiments.tools.reproduce.papers import SCALES, known_papers, load_paper
from experiments.tools.reproduce.parts import check, reproduce

DATA = "data/cache"  # folder of the data sets
SETTLED = ("output", "dataset.root")  # settings with an option here


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for a mistake, 1 if a part failed, 130 after Ctrl-C."""
    return run_command(lambda: _run(parser().parse_intermixed_args(arguments)), stopped="the same command resumes")


def _run(options: argparse.Namespace) -> int:
    out = options.out or Path("results/papers") / f"{options.paper}-{options.scale}"
    root = _root(options.root)
    for word in options.overrides:
        if word.partition("=")[0].lstrip("+~") in SETTLED:
            raise UserError(f"'{word}': --out says where runs are written, and --root where data is: leave it out")
    paper = load_paper(options.paper, options.scale, out=out, root=root, overrides=options.overrides)
    check_folder(out)
    check(paper)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        if failed := reproduce(paper, out):
            print_error(f"part {failed.name} failed; the same command goes on with it, and alone it is")
            print(shlex.join([sys.executable, *failed.arguments]), file=sys.stderr)
            return FAILED
        print(write_paper_page(paper, out))
    return 0


def _root(given: Path | None) -> str:
    """Return the folder of the data sets. Raises: UserError: it is not a folder."""
    if given is not None and not given.expanduser().is_dir():
        raise UserError(
            f"--root must be the folder of the data sets, {given} is none: see python -m data.prepare --list"
        )
    return str(given.expanduser()) if given else DATA


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("experiments.reproduce", description=__doc__)
    parser.add_argument("paper", help=f"one of {', '.join(known_papers())}")
    add_settings(parser, help="settings for every run of its studies")
    parser.add_argument("--scale", default="small", help=f"one of {', '.join(SCALES)} (%(default)s)")
    parser.add_argument("--root", type=to_path, metavar="DIR", help=f"folder of the data sets ({DATA})")
    parser.add_argument("--out", type=to_path, metavar="DIR", help="results/papers/PAPER-SCALE by default")
    return parser


if __name__ == "__main__":
    sys.exit(main())
