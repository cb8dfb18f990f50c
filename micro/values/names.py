"""Match parameter names with shell patterns: the whole name, case-sensitive."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

SHOWN = 3  # names in an error


def as_patterns(given: str | Iterable[str], setting: str) -> tuple[str, ...]:
    """Return one pattern, or several, as a tuple.

    Raises:
        ValueError: something else than strings, or an empty one.
    """
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{setting} must be patterns of parameter names such as '*.bias', got {pattern!r}")
    return patterns


def matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether ``name`` is as one of ``patterns``: ``*`` is any text, ``?`` one character, ``[ab]`` a or b."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_matched(patterns: Sequence[str], names: Collection[str], setting: str) -> None:
    """Raise ValueError where a pattern matches none of ``names``."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{setting}: no trained parameter is called '{pattern}', there are {listed(list(names))}")


def listed(names: Sequence[str]) -> str:
    """Return the first names in quotes, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
