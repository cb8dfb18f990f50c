"""A report as plain text, or as JSON."""

from collections.abc import Mapping
from dataclasses import asdict

from experiments.checkup.findings import Section, State
from experiments.runs import atomic_files

FORMAT = "micro-doctor-1"
MARKS: Mapping[State, str] = {"here": "+", "absent": "-", "failed": "!"}


def show(section: Section) -> None:
    """Print a section, a line for each finding."""
    names = max((len(line.name) for line in section.findings), default=0)
    values = max((len(line.value) for line in section.findings), default=0)
    print(section.title)
    for line in section.findings:
        print(f"  {MARKS[line.state]} {line.name:<{names}}  {line.value:<{values}}  {line.note}".rstrip())
    print(flush=True)


def to_json(sections: list[Section]) -> str:
    """Return the report as one JSON document; NaN and infinity become null."""
    found = {section.title: [asdict(line) for line in section.findings] for section in sections}
    return atomic_files.to_json({"format": FORMAT, "sections": found}, indent=1)
