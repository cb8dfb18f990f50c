"""What a user can get wrong, told in one line."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what was asked for: one line that names what was given, what is allowed and what to do."""


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest of ``allowed``, or an empty string when none is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
