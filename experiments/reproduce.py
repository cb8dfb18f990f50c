"""Run a paper's study and draw its figures: ``python -m experiments.reproduce PAPER --scale small|medium|paper``.

A paper is a file of conf/paper: commands in their order, for a laptop (small), as published (paper), and for some small
models on real data for as long as they learn (medium). Runs that are
finished are not run again, nor is a part whose command and inputs did not change. A part that fails ends the command.
All that is found is collected in one page, index.html, which opens without a network.

    python -m experiments.reproduce micro --scale small
    python -m experiments.reproduce oktopk --scale paper --root DATA cluster=local
"""

import argparse
import contextlib
import functools
import importlib
import io
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.config.command_line import FAILED, Parser, add_settings, print_error, run_command
from experiments.config.errors import OutputError, UserError
from experiments.config.option_types import to_path
from experiments.config.schema import TrainConfig
from experiments.reports.output import check_folder
from experiments.runs.atomic_files import DiskError
from experiments.studies.paper_reproduction.page import write_paper_page
from experiments.studies.paper_reproduction.papers import SCALES, Part, known_papers, load_paper
from experiments.studies.paper_reproduction.parts import Commands, check, reproduce
from experiments.sweeps.study import jobs_of
from experiments.training.preflight import prepare_runs

DATA = "data/cache"  # folder of the data sets
SETTLED = ("output", "dataset.root")  # settings that are options here


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake, 1 where a part failed, 130 after Ctrl-C."""
    return run_command(lambda: _run(parser().parse_intermixed_args(arguments)), stopped="the same command resumes")


def _run(options: argparse.Namespace) -> int:
    out = options.out or Path("results/papers") / f"{options.paper}-{options.scale}"
    root = _root(options.root)
    for word in options.overrides:
        if word.partition("=")[0].lstrip("+~") in SETTLED:
            raise UserError(f"'{word}': --out says where runs are written, and --root where data is: leave it out")
    commands = Commands(check=check_command, runs_of=runs_of)
    try:
        paper = load_paper(options.paper, options.scale, out=out, root=root, overrides=options.overrides)
        check_folder(out)
        check(paper, commands)
        out.mkdir(parents=True, exist_ok=True)
        if failed := reproduce(paper, out, commands, again=options.again):
            print_error(f"part {failed.name} failed; the same command goes on with it, and alone it is")
            print(shlex.join([sys.executable, *failed.arguments]), file=sys.stderr)
            return FAILED
        page = write_paper_page(paper, out)
    except DiskError as error:
        raise OutputError(str(error)) from None
    except OSError as error:
        raise OutputError(f"cannot write {error.filename or out}: {error.strerror}") from None
    print(page)
    return 0


def _root(given: Path | None) -> str:
    """Return the folder of the data sets. Raises: UserError: one is given, and is no folder."""
    if given is not None and not given.expanduser().is_dir():
        raise UserError(
            f"--root must be the folder of the data sets, {given} is none: see python -m data.prepare --list"
        )
    return str(given.expanduser()) if given else DATA


def runs_of(part: Part) -> list[TrainConfig]:
    """Return the checked runs of a part that trains. Raises: UserError as a sweep does."""
    return _composed(part.words[1:])


@functools.cache
def _composed(words: tuple[str, ...]) -> list[TrainConfig]:
    return prepare_runs(jobs_of(words[0], list(words[1:])))


def check_command(part: Part) -> None:
    """Parse a part's command as its entry point does, and check its options. Raises: UserError."""
    module = importlib.import_module(f"experiments.{part.words[0]}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            options = module.parser().parse_args(part.words[1:])
        if hasattr(module, "check_options"):
            module.check_options(options)
    except SystemExit:
        raise UserError(f"part {part.name}: its command asks for help alone") from None
    except UserError as error:
        raise UserError(f"part {part.name}: {error}") from None


def parser() -> Parser:
    """Return what reads the command line."""
    parser = Parser(
        prog="python -m experiments.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paper", help=f"one of {', '.join(known_papers())}")
    add_settings(parser, help="settings for every run of its studies")
    parser.add_argument("--scale", default="small", help=f"one of {', '.join(SCALES)} (%(default)s)")
    parser.add_argument("--root", type=to_path, metavar="DIR", help=f"folder of the data sets ({DATA})")
    parser.add_argument("--out", type=to_path, metavar="DIR", help="results/papers/PAPER-SCALE by default")
    parser.add_argument("--again", action="store_true", help="redo tables and figures that did not change, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
