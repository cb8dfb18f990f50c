"""Findings of checks: lines with a state, in sections; a failed check is a line too."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from experiments.config.errors import one_line_with_type
from experiments.runs.files import to_json as in_json

FORMAT = "micro-doctor-1"
State = Literal["here", "absent", "failed"]
MARKS: Mapping[State, str] = {"here": "+", "absent": "-", "failed": "!"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report.

    Attributes:
        name, value: what was checked, and the result.
        note: its use, or advice.
        state: absent: not available here, no error; failed: an error in the check.
        data: the finding as plain values for programs.
    """

    name: str
    value: str
    note: str = ""
    state: State = "here"
    data: Mapping[str, Any] = field(default_factory=dict)


def either(name: str, found: bool, value: str, note: str = "", **data: Any) -> Finding:
    """Return a line with state here or absent."""
    return Finding(name, value, note, "here" if found else "absent", data)


def carry_out(checks: Mapping[str, Callable[[], Iterable[Finding]]]) -> Iterator[Finding]:
    """Yield the findings of each check; an error becomes a line with the check's name and does not stop the others."""
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # the report must show any error
            yield Finding(name, "failed", one_line_with_type(error), "failed")


def show(title: str, findings: Sequence[Finding]) -> None:
    """Print a section with a line per finding."""
    names, values = (max((len(getattr(line, key)) for line in findings), default=0) for key in ("name", "value"))
    print(title)
    for line in findings:
        print(f"  {MARKS[line.state]} {line.name:<{names}}  {line.value:<{values}}  {line.note}".rstrip())
    print(flush=True)


def to_json(sections: Mapping[str, Sequence[Finding]]) -> str:
    """Return the report as one JSON document; NaN and infinity become null."""
    found = {title: [asdict(line) for line in findings] for title, findings in sections.items()}
    return in_json({"format": FORMAT, "sections": found}, indent=1)
