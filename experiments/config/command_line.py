"""What all commands have in common.

A list is one word, with commas: ``--world-sizes 2,4,8``. Settings of a training are KEY=VALUE words without an option.
A mistake is one line on standard error and exit code 2.
"""

import argparse
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from typing import NoReturn, TextIO, TypeVar, cast

from experiments.config import stopping
from experiments.config.errors import OutputError, RunFailed, UserError
from experiments.config.start_up import hide_warnings_of_torch

FAILED, MISTAKE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
FULL_ERROR = "HYDRA_FULL_ERROR"  # with 1 Hydra shows where an error comes from
NONE = "none"
_LONGEST_LINE = 2000  # characters of an error: more is content that the user gave
T = TypeVar("T")
# Messages of argparse, and their form in this project.
_WORDS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"invalid int value: (.*)", r"must be a whole number, got \1"),
    (r"invalid float value: (.*)", r"must be a number, got \1"),
    (r"invalid choice: (.*) \(choose from (.*)\)", lambda found: _not_among(found[2], found[1])),
    (r"^argument (\S+): ", r"\1 "),
    (r"^unrecognized arguments: (.*)", lambda found: _not_understood(found[1])),
)


def _not_among(allowed: str, given: str) -> str:
    return f"must be one of {allowed.replace(chr(39), '')}, got {given}"


def _not_understood(words: str) -> str:
    first = words.split()[0]
    if first.startswith("-"):
        return f"no such option: {words}"
    if "=" in first:
        return f"settings (KEY=VALUE) stand together, got '{first}' apart from the others"
    return f"not understood: '{words}'; lists are separated by commas: A,B"


def comma_list(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of an option that holds a list, which is one word: ``--world-sizes 2,4,8``."""

    def read(text: str) -> list[T]:
        values = [kind(word) for word in text.split(",") if word]
        if not values:
            raise argparse.ArgumentTypeError(f"must be values separated by commas, got '{text}'")
        return values

    return read


def comma_list_or_none(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of an option that holds a list as above, or the word ``none`` for an empty one."""
    read = comma_list(kind)
    return lambda text: [] if text == NONE else read(text)


def setting(word: str) -> str:
    """Return a word that sets a key of a training, as experiments.train takes it: the type of such arguments."""
    if "=" not in word and not word.startswith("~"):
        raise argparse.ArgumentTypeError(f"expected, got '{word}'; lists are separated by commas: A,B")
    return word


def add_settings(parser: argparse.ArgumentParser, *, help: str) -> None:
    """Declare ``overrides``, settings of a training; ``help`` says of which training, and what holds without any."""
    parser.add_argument("overrides", type=setting, nargs="*", metavar="KEY=VALUE", help=help)


class Parser(argparse.ArgumentParser):
    """Read a command line; a mistake raises UserError instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        for pattern, text in _WORDS:
            message = re.sub(pattern, text, message)
        raise UserError(f"{message}; see {self.prog} --help")


def print_error(error: object) -> None:
    """Print what went wrong in one line, whatever line breaks and however many words the user's own text has."""
    line = " ".join(str(error).splitlines())
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    print("error:", line, file=sys.stderr)


def shows_all() -> bool:
    """Return whether the user wants to see where an error comes from."""
    return os.environ.get(FULL_ERROR) == "1"


def _print_all(error: Exception) -> None:
    if shows_all():
        traceback.print_exception(error)
    print_error(error)


def _print_stopped(number: int, stopped: str) -> None:
    print(f"stopped by {stopping.name_of(number)}" + (f"; {stopped}" if stopped else ""), file=sys.stderr)


def _output_is_broken() -> bool:
    """Return whether standard output takes no more; what is left for it is then dropped."""
    try:
        sys.stdout.flush()
        if not _reader_has_ended(sys.stdout):  # an output without a buffer has nothing to flush
            return False
    except OSError:
        pass
    sys.stdout = _nothing("w")  # Python flushes it once more when the process ends
    return True


def _reader_has_ended(output: TextIO) -> bool:
    """Return whether this is a pipe that nobody reads any more."""
    try:
        number = output.fileno()
    except (OSError, ValueError):  # it is no file
        return False
    writing = select.poll()
    writing.register(number, 0)
    return any(event & select.POLLERR for _, event in writing.poll(0))


def _open_streams() -> None:
    """Give a process that was started without standard streams (``>&-``) some that lead nowhere.

    What the encoding of standard output does not have is written as a question mark.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, _nothing(mode))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _nothing(mode: str) -> TextIO:
    return cast(TextIO, open(os.devnull, mode))  # it is open as long as the process lives


def run_command(work: Callable[[], int], *, stopped: str = "", at_stop: stopping.Handler = stopping.raise_stop) -> int:
    """Return the exit code of a command: 2 after a UserError, 1 after an OutputError, and 130 after Ctrl-C.

    An error is printed in one line. After SIGTERM the code is 143, after SIGUSR1 75.

    Where standard output cannot be written any more, the code is 141 if its reader has ended (as ``head`` does), and
    else 1, with the reason.

    Args:
        stopped: what a stop signal leaves, to be printed after its name.
        at_stop: the handler of the stop signals, see experiments.config.stopping.
    """
    try:
        with stopping.handled(at_stop):
            return _exit_code(work, stopped)
    finally:
        stopping.end_command()


def _exit_code(work: Callable[[], int], stopped: str) -> int:
    hide_warnings_of_torch()
    _open_streams()
    try:
        code = work()
        sys.stdout.flush()
        return code
    except stopping.Stopped as stop:
        _print_stopped(stop.number, stopped)
        return stopping.exit_code(stop.number)
    except SystemExit as end:  # of --help; of rich, too, where it meets a closed pipe
        if isinstance(end.__context__, BrokenPipeError) or _output_is_broken():
            return PIPE_CLOSED
        raise
    except UserError as error:
        _print_all(error)
        return MISTAKE
    except (OutputError, RunFailed) as error:
        _print_all(error)
        return FAILED
    except OSError as error:
        if not _output_is_broken():
            raise
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        print_error(f"cannot write to standard output: {(error.strerror or str(error)).lower()}")
        return FAILED
    except KeyboardInterrupt:
        _print_stopped(signal.SIGINT, stopped)
        return INTERRUPTED
