"""Choose how many runs of a local sweep run at the same time."""

import os
from collections.abc import Mapping

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.launching.child_environment import num_cores


def num_at_once(configs: list[TrainConfig], jobs: str) -> int:
    """Return how many runs run at the same time.

    Args:
        jobs: A number, or auto. With auto each process of a run counts cluster.num_threads or else OMP_NUM_THREADS
            cores, or 1 if neither is set, and the cores limit the number of runs (simulated workers are one process).
            Auto is 1 if a run uses a GPU or several nodes.

    Raises:
        UserError: the number is out of range, or runs on several nodes would run at the same time.
    """
    check_jobs(jobs)
    several_nodes = any(config.cluster.nnodes > 1 for config in configs)
    if jobs != "auto":
        if several_nodes and int(jobs) > 1:
            raise UserError(f"--jobs {jobs}: runs of several nodes meet one after another, use --jobs 1")
        return max(1, min(int(jobs), len(configs)))
    if several_nodes or any(config.cluster.device == "cuda" for config in configs):
        return 1
    threads = _threads_of(os.environ)
    cores_per_run = (num_processes(config) * (config.cluster.num_threads or threads) for config in configs)
    return max(1, min(num_cores() // max(cores_per_run, default=1), len(configs)))


def check_jobs(jobs: str) -> None:
    """Raise UserError unless ``jobs`` is auto or a number of runs."""
    if jobs != "auto" and not (jobs.isdecimal() and int(jobs) >= 1):
        raise UserError(f"--jobs must be auto or a whole number of at least 1, got '{jobs}'")


def num_processes(config: TrainConfig) -> int:
    """Return how many processes a run has on each node: simulated workers share one."""
    return 1 if config.cluster.simulated else config.cluster.nproc_per_node


def threads_per_process(config: TrainConfig, at_once: int) -> int | None:
    """Return the number of cores for each process of a run; None if OMP_NUM_THREADS sets it."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, num_cores() // (at_once * num_processes(config)))


def _threads_of(environ: Mapping[str, str]) -> int:
    given = environ.get("OMP_NUM_THREADS", "")
    return max(1, int(given)) if given.isdecimal() else 1
