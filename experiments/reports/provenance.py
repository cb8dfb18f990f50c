"""The origin of runs (code, machine, torch, number of concurrent runs), and warnings if compared runs differ in it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from experiments.runs.manifest import code_name

ORIGIN = {  # column of runs -> what it says
    "code": "code revisions",
    "machine": "machines",
    "torch": "versions of torch",
    "runs_at_once": "runs at once",
}
UNKNOWN = "unknown"


def origin_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run's numbers may depend on beside its configuration, by column, from its manifest."""
    cpu, versions = (_mapping(manifest.get(key)) for key in ("cpu", "versions"))
    code = [code_name(git) or UNKNOWN for git in [*(manifest.get("earlier_git") or []), manifest.get("git")]]
    gpus = Counter(str(gpu) for gpu in manifest.get("gpus") or [])
    parts = [f"{cpu.get('num_cores')} cores of {cpu.get('model')}", *(f"{n} {gpu}" for gpu, n in gpus.items())]
    values = (
        " then ".join(dict.fromkeys(code)),
        ", ".join(parts) if cpu else UNKNOWN,
        str(versions.get("torch") or UNKNOWN),
        str(manifest.get("runs_at_once") or UNKNOWN),
    )
    return dict(zip(ORIGIN, values, strict=True))


def differences(runs: pd.DataFrame) -> list[str]:
    """Return a line for each thing in which some runs that stand side by side differ; none where they are alike."""
    return [f"different {name}: {_counted(runs, key)}" for key, name in ORIGIN.items() if runs[key].nunique() > 1]


def described(runs: pd.DataFrame) -> str:
    """Return in one line where some runs come from, each value with the number of its runs."""
    return "; ".join(f"{name}: {_counted(runs, key)}" for key, name in ORIGIN.items())


def _counted(runs: pd.DataFrame, column: str) -> str:
    found = Counter(runs.sort_values("run")[column])
    return ", ".join(f"{value} ({number})" for value, number in found.most_common())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
