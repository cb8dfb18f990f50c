"""Errors that a user can cause, and functions that write an error in one line."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake of the user, in one line that names what was given, what is allowed and what to do."""


class CannotWrite(UserError):
    """A file cannot be written: one line with the file and the reason. No mistake of the command."""


class RunFailed(RuntimeError):
    """A run began and failed; one line names the run and the cause. No mistake of the command."""


@contextmanager
def as_user_error(*kinds: type[Exception], before: str = "") -> Iterator[None]:
    """In this context, turn ValueError and errors of ``kinds`` into UserError, with ``before`` in front."""
    expected: tuple[type[Exception], ...] = (ValueError, *kinds)
    try:
        yield
    except expected as error:
        raise UserError(f"{before}{one_line(error)}") from None


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest of ``allowed``, or an empty string if none is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def short(text: str) -> str:
    """Return a text, shortened for an error message."""
    return text if len(text) <= 80 else f"{text[:60]}..."


def shown(value: object) -> str:
    """Return a value as a user would write it."""
    if isinstance(value, str):
        return f"'{short(value)}'"
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else short(str(value))


def not_among(key: str, allowed: Iterable[str], given: str) -> str:
    """Return the message for a value that is not allowed."""
    known = list(allowed)
    return f"{key} must be one of {', '.join(known)}, got '{short(given)}'{suggestion(given, known)}"


def check_choice(key: str, allowed: Iterable[str], given: str) -> None:
    """Raise UserError if ``given`` is not in ``allowed``."""
    known = list(allowed)
    if given not in known:
        raise UserError(not_among(key, known, given))


def one_line(error: object) -> str:
    """Return the text of an error in one line, or the name of its type if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def one_line_with_type(error: BaseException) -> str:
    """Return the type and the text of an error in one line: ``ValueError: no such file``."""
    return one_line(f"{type(error).__name__}: {error}")
