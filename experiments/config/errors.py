"""Errors that a user can cause, and functions that write an error in one line."""

import difflib
from collections.abc import Iterable

_HINTS = ("To append", "object_type", "full_key", "reference_type", "See ")  # lines of Hydra that help no user


class UserError(ValueError):
    """A mistake of the user, in one line that names what was given, what is allowed and what to do."""


class OutputError(RuntimeError):
    """Results that could not be written where they belong; one line says where they are. No mistake of the user."""


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest of ``allowed``, or an empty string when none is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def short(text: str) -> str:
    """Return a text, cut where it would fill the line of an error."""
    return text if len(text) <= 80 else f"{text[:60]}..."


def check_choice(key: str, allowed: Iterable[str], given: str) -> None:
    """Raise UserError where ``given`` is not among ``allowed``."""
    known = list(allowed)
    if given not in known:
        raise UserError(f"{key} must be one of {', '.join(known)}, got '{short(given)}'{suggestion(given, known)}")


def one_line(error: object) -> str:
    """Return the text of an error on one line, or the name of its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def one_line_with_type(error: BaseException) -> str:
    """Return the type and the text of an error on one line: ``ValueError: no such file``."""
    return one_line(f"{type(error).__name__}: {error}")


def one_line_of_hydra(error: Exception) -> str:
    """Return the message of an error of Hydra or OmegaConf on one line, without its hints."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join([line for line in lines if line and not line.startswith(_HINTS)][:3])
