"""The environment of child processes: import paths, and the number of cores."""

import os
from collections.abc import Mapping
from pathlib import Path

from experiments.config.paths import ROOT


def child_environment(code: Path = ROOT, /, **variables: str) -> dict[str, str]:
    """Return this process's environment with ``variables``, for a child that imports the packages in ``code``."""
    return with_python_path({**os.environ, **variables}, code)


def with_python_path(environment: Mapping[str, str], code: Path = ROOT) -> dict[str, str]:
    """Return ``environment`` with the repository before its other import paths, whatever the working directory is."""
    paths = [str(code), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def keep_to_core(number: int) -> None:
    """Let this process, and the threads that it starts from now on, run on one of its cores, counted in a circle."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def num_cores() -> int:
    """Return the number of cores this process may use, which inside a SLURM job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
