"""What checks find: lines with a state, in sections; a check that fails is a line too."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from experiments.config.errors import one_line_with_type

State = Literal["here", "absent", "failed"]
Check = Callable[[], Iterable["Finding"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a report.

    Attributes:
        name: what was looked at.
        value: what is there.
        note: what that is good for, or what to do.
        state: absent is no error: something can then not be done here.
        data: the same as plain values, where a program would want more than the text.
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


def section(title: str, **checks: Check) -> Section:
    """Carry out checks, each for itself: an error in one is a line under the check's name, and the others go on."""
    return Section(title=title, findings=tuple(line for name, check in checks.items() for line in _tried(name, check)))


def _tried(name: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # whatever it is, it is what the report is for
        return [Finding(name=name, value="failed", note=one_line_with_type(error), state="failed")]
