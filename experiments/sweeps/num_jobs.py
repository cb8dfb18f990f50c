"""Choose the number of concurrent runs of a local sweep, and their threads."""

import os
from collections.abc import Collection

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.launching.rank_environment import num_cores


def num_at_once(configs: Collection[TrainConfig], jobs: str) -> int:
    """Return how many runs go on at once.

    Args:
        jobs: a number, or auto: as many as the cores allow. Each process of a run counts cluster.num_threads or else
            OMP_NUM_THREADS cores, or 1 if neither is set. Auto is 1 if a run uses a GPU or several nodes.

    Raises:
        UserError: the number is out of range, or runs on several nodes would go on at once.
    """
    if jobs != "auto" and not (jobs.isdecimal() and int(jobs) >= 1):
        raise UserError(f"--jobs must be auto or a whole number of at least 1, got '{jobs}'")
    has_nodes = any(config.cluster.nnodes > 1 for config in configs)
    if has_nodes and jobs not in ("auto", "1"):
        raise UserError(f"--jobs {jobs}: runs of several nodes meet one after another, use --jobs 1")
    if has_nodes or (jobs == "auto" and any(config.cluster.device == "cuda" for config in configs)):
        return 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() else 1
    cores_per_run = (num_processes(config) * max(1, config.cluster.num_threads or threads) for config in configs)
    wanted = num_cores() // max(cores_per_run, default=1) if jobs == "auto" else int(jobs)
    return max(1, min(wanted, len(configs)))


def num_processes(config: TrainConfig) -> int:
    """Return how many processes a run has on each node: simulated workers share one."""
    return 1 if config.cluster.simulated else config.cluster.nproc_per_node


def threads_per_process(config: TrainConfig, at_once: int) -> int | None:
    """Return the number of cores for each process of a run; None where it is alone or OMP_NUM_THREADS sets it."""
    if at_once == 1 or os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, num_cores() // (at_once * num_processes(config)))
