"""Check numbers, words, paths and addresses from configurations and options.

Each ``check`` raises UserError with the same form: ``KEY must be ..., got ...``.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

from experiments.config.errors import UserError, check_choice, short, shown

MOST = 2**31 - 1  # most steps, workers, bytes per message: some libraries have 32-bit counts
MOST_ON_A_MACHINE = 4096  # most workers or threads
LARGEST_SEED = 2**63 - 1
MOST_RUNS = 10_000  # most runs of a command line or study
LAST_PORT = 65_535
_LONGEST_PATH, _LONGEST_PART = 4000, 255  # bytes: limits of Linux, with room for the files of a run folder


class Allowed(Protocol):
    """The limits of a setting."""

    def check(self, key: str, value: Any) -> None:
        """Raise UserError for a value that is not allowed."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``lowest`` to ``highest``; never NaN, nor infinity.

    Attributes:
        above: whether ``lowest`` itself is left out.
        below: whether ``highest`` itself is left out.
    """

    lowest: float = 0
    highest: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        """Return whether a number is allowed."""
        over = value > self.lowest if self.above else value >= self.lowest
        return over and (value < self.highest if self.below or self.highest == math.inf else value <= self.highest)

    def __str__(self) -> str:
        """Return the range as in ``must be at least 1`` or ``must be in (0, 1]``."""
        if self.highest == math.inf:
            return f"{'above' if self.above else 'at least'} {self.lowest}"
        return f"in {'[('[self.above]}{self.lowest}, {self.highest}{'])'[self.below]}"

    def check(self, key: str, value: float) -> None:
        """Raise UserError unless a number is in the range."""
        if value not in self:
            raise UserError(f"{key} must be {self}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some words."""

    names: tuple[str, ...]

    def check(self, key: str, value: str) -> None:
        """Raise UserError for another word."""
        check_choice(key, self.names, value)


@dataclass(frozen=True, slots=True)
class Text:
    """A text that matches a pattern; ``what`` says in words what it must be."""

    what: str
    pattern: str

    def check(self, key: str, value: object) -> None:
        """Raise UserError unless the whole text matches."""
        if not (isinstance(value, str) and re.fullmatch(self.pattern, value)):
            raise UserError(f"{key} must be {self.what}, got {short(str(value))!r}")


class PathName:
    """A path that a file or folder can have."""

    def check(self, key: str, value: str) -> None:
        """Raise UserError for a text that is no such path."""
        parts = [len(part.encode(errors="replace")) for part in value.split("/")]
        if not value.strip():
            raise UserError(f"{key} must be a path, got '{value}'")
        if any(not letter.isprintable() for letter in value):
            raise UserError(f"{key} must be a path without control characters, got {short(value)!r}")
        if sum(parts) + len(parts) > _LONGEST_PATH or max(parts) > _LONGEST_PART:
            raise UserError(
                f"{key} must be a path of at most {_LONGEST_PATH} bytes, {_LONGEST_PART} between slashes, got one of "
                f"{len(value)} characters: '{short(value)}'"
            )


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
SHARE = Range(0, 1, above=True)  # above 0, such as a density
PART = Range(0, 1)
DECAY = Range(0, 1, below=True)  # below 1, such as a momentum
COUNT = Range(1, MOST)
COUNT_OR_NONE = Range(0, MOST)
ON_A_MACHINE = Range(1, MOST_ON_A_MACHINE)
NAME = Text("a word of at most 100 letters, digits and _.+-", r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")  # names folders
PATH = PathName()


def check_num_runs(what: str, number: int) -> None:
    """Raise UserError if one command would have more than MOST_RUNS runs."""
    if number > MOST_RUNS:
        raise UserError(f"{what} describes {number} runs, at most {MOST_RUNS} are allowed: name fewer values")


def host_and_port(endpoint: str, *, key: str, nnodes: int) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``; port 0 means a free one, for a single node.

    Args:
        key: the name of the setting, for the message.

    Raises:
        UserError: it is not HOST:PORT, or the port is out of its range.
    """
    host, _, port = endpoint.rpartition(":")
    if not re.fullmatch(r"[^\s/]+", host):
        raise UserError(f"{key} must be HOST:PORT, one of the nodes and a free port of it, got {endpoint!r}")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > LAST_PORT:
        raise UserError(f"{key} must have a port from 1 to {LAST_PORT}, got {endpoint!r}")
    if nnodes > 1 and int(port) == 0:
        raise UserError(f"{key} must name a port when nnodes is {nnodes}, got {endpoint!r}")
    return host, int(port)
