"""What all commands have in common: a mistake is one line on standard error and exit code 2."""

import argparse
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from experiments.config.errors import UserError

MISTAKE, INTERRUPTED = 2, 130
# Messages of argparse, and how the errors of this project are put.
_WORDS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"invalid int value: (.*)", r"must be a whole number, got \1"),
    (r"invalid float value: (.*)", r"must be a number, got \1"),
    (r"invalid choice: (.*) \(choose from (.*)\)", lambda found: _not_among(found[2], found[1])),
    (r"^argument (\S+): ", r"\1 "),
)


def _not_among(allowed: str, given: str) -> str:
    return f"must be one of {allowed.replace(chr(39), '')}, got {given}"


class Parser(argparse.ArgumentParser):
    """Read a command line; a mistake raises UserError instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        for pattern, text in _WORDS:
            message = re.sub(pattern, text, message)
        raise UserError(f"{message}; see {self.prog} --help")


def run_command(work: Callable[[], int], *, stopped: str = "") -> int:
    """Return the exit code of a command: 2 for a mistake, which is told in one line, 130 after Ctrl-C.

    Args:
        stopped: what to tell the user after Ctrl-C.
    """
    try:
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        if stopped:
            print(stopped, file=sys.stderr)
        return INTERRUPTED
