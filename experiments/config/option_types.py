"""Types of options: each reads one word, and says in the project's words what is allowed."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from experiments.config.errors import UserError
from experiments.config.ranges import MOST, check_path


def whole_number(lowest: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Return the type of a whole number in a range."""

    def read(text: str) -> int:
        value = int(_number(int, text, "a whole number"))
        if value < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {value}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
        return value

    return read


def to_positive(text: str) -> float:
    """Return a word as a finite number above 0."""
    value = _number(float, text, "a number")
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def to_density(text: str) -> float:
    """Return a word as a share in (0, 1]."""
    value = _number(float, text, "a number")
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def to_path(text: str) -> Path:
    """Return a word as a path."""
    try:
        check_path("it", text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("it ")) from None
    return Path(text)


def _number(kind: type[int] | type[float], text: str, what: str) -> float:
    try:
        if text.isascii():
            return kind(text)
    except ValueError:  # also a number of thousands of digits
        pass
    raise argparse.ArgumentTypeError(f"must be {what}, got '{text[:80]}'")
