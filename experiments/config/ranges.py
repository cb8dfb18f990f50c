"""What a user may give for a number, a name, a path or an address, in a configuration or for an option.

Each check raises UserError in one form: ``KEY must be ..., got ...``.
"""

import math
import re
from dataclasses import dataclass

from experiments.config.errors import UserError, short, shown

MOST = 2**31 - 1  # of steps, workers, bytes per message: counts are 32-bit in some libraries
MOST_ON_A_MACHINE = 4096  # workers or threads
LARGEST_SEED = 2**63 - 1
MOST_RUNS = 10_000  # of one command line or study
LAST_PORT = 65_535
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
_LONGEST_PATH, _LONGEST_PART = 4000, 255  # bytes: limits of Linux, with room for the files of a run folder


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
        under = value < self.highest if self.below or self.highest == math.inf else value <= self.highest
        return over and under

    def __str__(self) -> str:
        """Return the range as in ``must be at least 1`` or ``must be in (0, 1]``."""
        if self.highest == math.inf:
            return f"{'above' if self.above else 'at least'} {self.lowest}"
        opens, closes = "(" if self.above else "[", ")" if self.below else "]"
        return f"in {opens}{self.lowest}, {self.highest}{closes}"

    def check(self, key: str, value: float) -> None:
        """Raise UserError unless a number is in the range."""
        if value not in self:
            raise UserError(f"{key} must be {self}, got {shown(value)}")


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
SHARE = Range(0, 1, above=True)  # of something that is never empty, as a density
PART = Range(0, 1)
DECAY = Range(0, 1, below=True)  # of a sum over steps, as a momentum
COUNT = Range(1, MOST)
COUNT_OR_NONE = Range(0, MOST)
ON_A_MACHINE = Range(1, MOST_ON_A_MACHINE)


def check_name(key: str, value: str) -> None:
    """Raise UserError unless a word can be part of the name of a run, which is the name of its folder."""
    if not _NAME.fullmatch(value):
        raise UserError(f"{key} must be a word of at most 100 letters, digits and _.+-, got {short(value)!r}")


def check_path(key: str, value: str) -> None:
    """Raise UserError where no file or folder can have this path."""
    if not value.strip():
        raise UserError(f"{key} must be a path, got '{value}'")
    if any(not letter.isprintable() for letter in value):
        raise UserError(f"{key} must be a path without control characters, got {short(value)!r}")
    parts = [len(part.encode(errors="replace")) for part in value.split("/")]
    if sum(parts) + len(parts) > _LONGEST_PATH or max(parts) > _LONGEST_PART:
        raise UserError(
            f"{key} must be a path of at most {_LONGEST_PATH} bytes, {_LONGEST_PART} between slashes, got one of "
            f"{len(value)} characters: '{short(value)}'"
        )


def check_num_runs(what: str, number: int) -> None:
    """Raise UserError where one command would carry out more runs than any machine could."""
    if number > MOST_RUNS:
        raise UserError(f"{what} describes {number} runs, at most {MOST_RUNS} are allowed: name fewer values")


def host_and_port(endpoint: str, *, key: str, nnodes: int) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``; port 0 takes a free one, for a single node.

    Args:
        key: the name of the setting, for the message.

    Raises:
        UserError: it is not HOST:PORT, or the port is out of its range.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or host != host.strip() or any(letter in host for letter in " /\t\n"):
        raise UserError(f"{key} must be HOST:PORT, one of the nodes and a free port of it, got {endpoint!r}")
    if not (port.isdecimal() and port.isascii()) or len(port) > 9 or int(port) > LAST_PORT:
        raise UserError(f"{key} must have a port from 1 to {LAST_PORT}, got {endpoint!r}")
    if nnodes > 1 and int(port) == 0:
        raise UserError(f"{key} must name a port when nnodes is {nnodes}, got {endpoint!r}")
    return host, int(port)
