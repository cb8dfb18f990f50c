"""The origin of runs (code, machine, torch, number of concurrent runs), and warnings if compared runs differ in it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.runs.manifest import code_name

Origin = Mapping[str, str]

UNKNOWN = "unknown"


def origin_of(manifest: Mapping[str, Any]) -> Origin:
    """Return what a run's numbers may depend on beside its configuration, in words, from its manifest."""
    cpu, versions = (_mapping(manifest.get(key)) for key in ("cpu", "versions"))
    code = [code_name(git) or UNKNOWN for git in [*(manifest.get("earlier_git") or []), manifest.get("git")]]
    gpus = Counter(str(gpu) for gpu in manifest.get("gpus") or [])
    parts = [f"{cpu.get('num_cores')} cores of {cpu.get('model')}", *(f"{n} {gpu}" for gpu, n in gpus.items())]
    return {
        "code revisions": " then ".join(dict.fromkeys(code)),
        "machines": ", ".join(parts) if cpu else UNKNOWN,
        "versions of torch": str(versions.get("torch") or UNKNOWN),
        "runs at once": str(manifest.get("runs_at_once") or UNKNOWN),
    }


def differences(origins: Mapping[str, Origin], runs: Iterable[str]) -> list[str]:
    """Return a line for each thing in which some runs that stand side by side differ; none where they are alike."""
    return [f"different {key}: {_counted(found)}" for key, found in _found(origins, runs).items() if len(found) > 1]


def unlike(studies: Mapping[str, Iterable[str]], origins: Mapping[str, Origin]) -> list[str]:
    """Return a line for each study, of runs side by side, and each thing in which its runs differ."""
    return [f"{study}: {line}" for study, runs in studies.items() for line in differences(origins, runs)]


def described(origins: Mapping[str, Origin], runs: Iterable[str]) -> str:
    """Return in one line where some runs come from, each value with the number of its runs."""
    return "; ".join(f"{key}: {_counted(found)}" for key, found in _found(origins, runs).items())


def _found(origins: Mapping[str, Origin], runs: Iterable[str]) -> dict[str, Counter[str]]:
    chosen = [origins[run] for run in sorted(set(runs)) if run in origins]
    return {key: Counter(origin[key] for origin in chosen) for key in (chosen[0] if chosen else ())}


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{value} ({number})" for value, number in found.most_common())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
