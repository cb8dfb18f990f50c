"""Types of command-line options: each parses one word and names the allowed values in its error."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from experiments.config.errors import UserError
from experiments.config.paths import ROOT
from experiments.config.ranges import MOST, PATH, POSITIVE, SHARE, Range

Number = TypeVar("Number", int, float)
T = TypeVar("T")
NONE = "none"


def whole_number(lowest: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Return the type of a whole number in a range."""
    return _number(int, "a whole number", Range(lowest, most))


def to_path(text: str) -> Path:
    """Return a word as a path."""
    try:
        PATH.check("it", text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("it ")) from None
    return Path(text)


def to_known_path(text: str) -> Path:
    """Return a word as the path of a file, in the current folder or otherwise in the repository."""
    path = to_path(text)
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path


def comma_list(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of an option with a list in one word: ``--world-sizes 2,4,8``."""

    def read(text: str) -> list[T]:
        values = [kind(word) for word in text.split(",") if word]
        if not values:
            raise argparse.ArgumentTypeError(f"must be values separated by commas, got '{text}'")
        return values

    return read


def comma_list_or_none(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of an option with such a list, or ``none`` for an empty one."""
    read = comma_list(kind)
    return lambda text: [] if text == NONE else read(text)


def setting(word: str) -> str:
    """Return a word KEY=VALUE for experiments.train: the type of such arguments."""
    if "=" not in word and not word.startswith("~"):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got '{word}'; lists are separated by commas: A,B")
    return word


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
