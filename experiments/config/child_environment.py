"""The environment of child processes: import paths, and the number of cores."""

import os
from collections.abc import Mapping
from pathlib import Path

from experiments.config.paths import ROOT


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with ``variables``, for a child that imports this repository."""
    return with_python_path({**os.environ, **variables})


def with_python_path(environment: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Return ``environment`` with the repository before its other import paths, whatever the working directory is."""
    paths = [str(root), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def num_cores() -> int:
    """Return the number of cores this process may use, which inside a SLURM job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
