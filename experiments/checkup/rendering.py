"""A report as plain text, or as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from experiments.checkup.findings import Section, State

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
    return json.dumps({"format": FORMAT, "sections": _finite(found)}, indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
