"""Types of the tools' options beside those of experiments.config.command_line."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from experiments.config import ROOT
from experiments.config.command_line import comma_list, to_path
from experiments.config.ranges import MOST, POSITIVE, SHARE, Range

Number = TypeVar("Number", int, float)
T = TypeVar("T")
NONE = "none"


def whole_number(lowest: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Return the type of a whole number in a range."""
    return _number(int, "a whole number", Range(lowest, most))


def to_known_path(text: str) -> Path:
    """Return a word as the path of a file, in the current folder or otherwise in the repository."""
    path = to_path(text)
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path


def comma_list_or_none(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of an option with such a list, or ``none`` for an empty one."""
    read = comma_list(kind)
    return lambda text: [] if text == NONE else read(text)


def _number(kind: type[Number], what: str, allowed: Range) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        try:
            if not text.isascii():
                raise ValueError
            value = kind(text)
        except ValueError:  # also for a number with thousands of digits
            raise argparse.ArgumentTypeError(f"must be {what}, got '{text[:80]}'") from None
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return value

    return read


to_positive = _number(float, "a number", POSITIVE)
to_density = _number(float, "a number", SHARE)
