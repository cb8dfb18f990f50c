"""Small parts of a written report: the command and the machine it ran on, tables, files of numbers."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from experiments.runs.manifest import collect_manifest


def opening(title: str, module: str, arguments: Sequence[str], world_size: int) -> str:
    """Return the first lines of a report: what it is about, how it was made, where and with what."""
    command = shlex.join(["python", "-m", module, *arguments])
    facts = collect_manifest(seed=0, command=[command], world_size=world_size, data_checksums={}, extra={})
    names = ("python", "torch", "numba")
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in names if facts["versions"][name])
    cpu, revision = facts["cpu"], facts["git"]["revision"]
    code = f", revision {revision[:8]}{' with changes' if facts['git']['dirty'] else ''}" if revision else ""
    return f"# {title}\n\n`{command}` on {cpu['num_cores']} cores of {cpu['model']}, {versions}{code}.\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of cells as they are given, the first column to the left, the others to the right."""
    frame = pd.DataFrame(list(rows), columns=list(columns))
    alignment = ["left", *["right"] * (len(columns) - 1)]
    return str(frame.to_markdown(index=False, disable_numparse=True, colalign=alignment))


def write_csv(numbers: pd.DataFrame, path: Path) -> Path:
    """Write numbers as every figure's are written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers.to_csv(path, index=False, float_format="%.8g", lineterminator="\n")
    return path
