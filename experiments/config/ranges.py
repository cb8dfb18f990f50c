"""What a user may give for a number, a name or a path, on a command line or in a configuration."""

import re

from experiments.config.errors import UserError, short

MOST = 2**31 - 1  # of steps, workers, bytes per message: counts are 32-bit in some libraries
MOST_ON_A_MACHINE = 4096  # workers or threads
LARGEST_SEED = 2**63 - 1
MOST_RUNS = 10_000  # of one command line or study
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
_LONGEST_PATH, _LONGEST_PART = 4000, 255  # bytes: limits of Linux, with room for the files of a run folder


def check_count(key: str, value: int, lowest: int, most: int = MOST) -> None:
    """Raise UserError unless a whole number is in its range."""
    if value < lowest:
        raise UserError(f"{key} must be at least {lowest}, got {value}")
    if value > most:
        raise UserError(f"{key} must be at most {most}, got {value}")


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
