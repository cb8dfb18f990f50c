"""Shared by all commands: options and their types, printing errors in one line, and exit codes.

A list is one word, with commas: ``--world-sizes 2,4,8``. Settings of a training are KEY=VALUE words without an option.
A mistake is one line on standard error and exit code 2.
"""

import argparse
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from experiments.config import stopping
from experiments.config.errors import CannotWrite, RunFailed, UserError
from experiments.config.ranges import PATH

T = TypeVar("T")
FAILED, MISTAKE, PIPE_CLOSED = 1, 2, 141
FULL_ERROR = "HYDRA_FULL_ERROR"  # with 1 Hydra shows where an error comes from
_LONGEST_LINE = 2000  # longest error line; longer ones repeat the user's content


class Parser(argparse.ArgumentParser):
    """Read a command line; a mistake raises UserError instead of printing the usage.

    Args:
        prog: the name of the command, as in ``experiments.sweep``.
    """

    def __init__(self, prog: str = "", **settings: Any) -> None:
        prog = f"python -m {prog}" if prog.startswith("experiments.") else prog
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog=prog or None, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def to_path(text: str) -> Path:
    """Return a word as a path."""
    try:
        PATH.check("it", text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("it ")) from None
    return Path(text)


def comma_list(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of an option with a list in one word: ``--world-sizes 2,4,8``."""

    def read(text: str) -> list[T]:
        values = [kind(word) for word in text.split(",") if word]
        if not values:
            raise argparse.ArgumentTypeError(f"must be values separated by commas, got '{text}'")
        return values

    return read


def setting(word: str) -> str:
    """Return a word KEY=VALUE for experiments.train: the type of such arguments."""
    if "=" not in word and not word.startswith("~"):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got '{word}'; lists are separated by commas: A,B")
    return word


def add_settings(parser: argparse.ArgumentParser, *, help: str) -> None:
    """Declare ``overrides``, settings of a training; ``help`` names the training and the defaults."""
    parser.add_argument("overrides", type=setting, nargs="*", metavar="KEY=VALUE", help=help)


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare ``--out``, the folder for the output."""
    parser.add_argument("--out", type=to_path, default=Path(default), help="folder (%(default)s)")


def print_error(error: object) -> None:
    """Print an error in one line, without line breaks, and shortened if it is long."""
    line = " ".join(str(error).splitlines())
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    print("error:", line, file=sys.stderr)


def run_command(work: Callable[[], int], *, stopped: str = "", at_stop: stopping.Handler = stopping.raise_stop) -> int:
    """Return the exit code of a command: 2 after a UserError, 1 after CannotWrite or RunFailed, and 130 after Ctrl-C.

    An error is printed in one line. After SIGTERM the code is 143, after SIGUSR1 75.

    Where standard output cannot be written any more, the code is 141 if its reader has ended (as ``head`` does), and
    else 1, with the reason.

    Args:
        stopped: what a stop signal leaves, to be printed after its name.
        at_stop: the handler of the stop signals, see experiments.config.stopping.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # letters that the encoding lacks become question marks
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: a lost connection has 40 warnings
    os.environ["MPLBACKEND"] = "agg"  # read at matplotlib's import: figures are files, also in a notebook
    try:
        with stopping.handled(at_stop):
            return _exit_code(work, stopped)
    finally:
        stopping.end_command()


def _exit_code(work: Callable[[], int], stopped: str) -> int:
    try:
        code = work()
        sys.stdout.flush()
        return code
    except (stopping.Stopped, KeyboardInterrupt) as stop:
        number = stop.number if isinstance(stop, stopping.Stopped) else signal.SIGINT
        print(f"stopped by {stopping.name_of(number)}" + (f"; {stopped}" if stopped else ""), file=sys.stderr)
        return stopping.exit_code(number)
    except SystemExit as end:  # after --help, or by rich at a closed pipe
        if isinstance(end.__context__, BrokenPipeError) or _output_is_broken():
            return PIPE_CLOSED
        raise
    except (UserError, RunFailed) as error:
        if os.environ.get(FULL_ERROR) == "1":
            traceback.print_exception(error)
        print_error(error)
        return FAILED if isinstance(error, CannotWrite | RunFailed) else MISTAKE
    except OSError as error:
        if not _output_is_broken() and not isinstance(error, BrokenPipeError):
            raise
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        print_error(f"cannot write to standard output: {(error.strerror or str(error)).lower()}")
        return FAILED


def _output_is_broken() -> bool:
    """Return whether standard output cannot be written; if so, drop its buffer."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it once more when the process ends
        return True
    return False
