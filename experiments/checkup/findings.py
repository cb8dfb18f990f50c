"""The findings of checks: lines with a state, in sections; a failed check is a line too."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from experiments.config.errors import one_line_with_type

State = Literal["here", "absent", "failed"]
Check = Callable[[], Iterable["Finding"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a report.

    Attributes:
        name: what was checked.
        value: what was found.
        note: what it is used for, or what to do.
        state: absent is not an error, it says that something cannot be used here; failed is an error of the check.
        data: the finding as plain values for programs.
    """

    name: str
    value: str
    note: str = ""
    state: State = "here"
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Lines under one title."""

    title: str
    findings: tuple[Finding, ...]


def section(title: str, *checks: Check) -> Section:
    """Carry out each check; an error in one becomes a line under its name and does not stop the others."""
    return Section(title=title, findings=tuple(line for check in checks for line in _carry_out(check)))


def _carry_out(check: Check) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # the report must show any error
        name = getattr(check, "func", check).__name__.strip("_")
        yield Finding(name=name, value="failed", note=one_line_with_type(error), state="failed")
