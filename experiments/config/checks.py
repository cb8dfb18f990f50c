"""Check the settings of a run, without building parts or reading files."""

import math
from pathlib import Path

from experiments.config.endpoints import host_and_port
from experiments.config.errors import UserError, check_choice
from experiments.config.optimizer_settings import check_optimizer
from experiments.config.schema import TIMEOUT_S, ClusterConfig, TrainConfig
from experiments.config.slurm_settings import IN_JOB, check_slurm
from experiments.config.tracking_settings import check_tracking

DEVICES = ("auto", "cpu", "cuda")
FILES = ("trace", "link", "select")  # keys of a schedule that name files
SCALES = ("paper", "small")
SHAPES = ("steps", "linear", "cosine")
PRECISIONS = ("float32", "bfloat16")
RESIZES = ("refuse", "average")
TIMEOUTS_S = (5.0, 604_800.0)  # a beat every quarter of a second at the least; a week


def check_settings(config: TrainConfig, *, joined_world_size: int | None = None) -> None:
    """Check every setting; fill in the world size, the density of methods that send everything, and the home folder.

    Args:
        joined_world_size: the number of ranks, if torchrun or srun started this process as one of them.

    Raises:
        UserError: a value out of its range, or settings that contradict each other.
    """
    _complete_cluster(config.cluster, joined_world_size)
    if config.sparsifier.sends_everything:
        config.density = 1.0
    _expand_home(config)
    _check_numbers(config)


def _expand_home(config: TrainConfig) -> None:
    if config.output.startswith("~"):
        config.output = str(Path(config.output).expanduser())
    for holder, key in ((config, "start_from"), (config.dataset, "root"), *((config.schedule, k) for k in FILES)):
        given = getattr(holder, key)
        if given and given.startswith("~"):
            setattr(holder, key, str(Path(given).expanduser()))


def _complete_cluster(cluster: ClusterConfig, joined_world_size: int | None) -> None:
    """Check the numbers of the cluster and fill in its world size."""
    _at_least("cluster.nproc_per_node", cluster.nproc_per_node, 1)
    _at_least("cluster.nnodes", cluster.nnodes, 1)
    if cluster.num_threads is not None:
        _at_least("cluster.num_threads", cluster.num_threads, 1)
    lowest, highest = TIMEOUTS_S
    if not lowest <= cluster.timeout_s <= highest:
        raise UserError(f"cluster.timeout_s must be in [{lowest:g}, {highest:,.0f}] seconds, got {cluster.timeout_s:g}")
    check_choice("cluster.device", DEVICES, cluster.device)
    check_slurm(cluster.slurm)
    if cluster.simulated:
        if joined_world_size:
            raise UserError(
                f"cluster=simulated trains in one process, but torchrun or srun started ranks ({joined_world_size}): "
                "call it without them"
            )
        if cluster.timeout_s != TIMEOUT_S:
            raise UserError("cluster.timeout_s is for real workers, simulated ones wait for no other: leave it out")
        if cluster.world_size is None:
            raise UserError("cluster.world_size is missing: say how many workers to simulate")
        _at_least("cluster.world_size", cluster.world_size, 1)
        return
    if cluster.rdzv_endpoint != IN_JOB:
        nnodes = 1 if joined_world_size else cluster.nnodes  # ranks that were started do not use it
        host_and_port(cluster.rdzv_endpoint, key="cluster.rdzv_endpoint", nnodes=nnodes)
    started = joined_world_size or cluster.nnodes * cluster.nproc_per_node
    if cluster.world_size not in (None, started):
        how = "ranks were started" if joined_world_size else "= nnodes x nproc_per_node"
        raise UserError(
            f"cluster.world_size is {cluster.world_size}, but {started} {how}: leave it out or make them equal"
        )
    cluster.world_size = started


def _check_numbers(config: TrainConfig) -> None:
    lowest = {"epochs": 1, "batch_size": 1, "accumulate": 1, "seed": 0}
    for key, value in lowest.items():
        _at_least(key, getattr(config, key), value)
    _at_least("density_warmup.steps", config.density_warmup.steps, 0)
    _at_least("measure_residual_every", config.measure_residual_every, 0)
    _at_least("checkpoint.every_steps", config.checkpoint.every_steps, 0)
    _at_least("checkpoint.keep", config.checkpoint.keep, 1)
    _at_least("cluster.max_restarts", config.cluster.max_restarts, 0)
    if config.cluster.max_restarts and config.cluster.simulated:
        raise UserError("cluster.max_restarts restarts real workers, simulated ones have none: leave it out")
    for key in ("lr_warmup_epochs", "lr_warmup_start"):
        value = getattr(config, key)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{key} must be at least 0, got {value}")
    for key in ("lr", "lr_decay"):
        value = getattr(config, key)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{key} must be positive, got {value}")
    if not config.checkpoint.every_s >= 0:
        raise UserError(f"checkpoint.every_s must be at least 0, got {config.checkpoint.every_s}")
    for key, known in {"scale": SCALES, "lr_shape": SHAPES, "precision": PRECISIONS, "resize": RESIZES}.items():
        check_choice(key, known, getattr(config, key))
    if config.lr_shape != "steps" and config.lr_milestones:
        raise UserError(f"lr_milestones are for lr_shape=steps, got {config.lr_milestones} for {config.lr_shape}")
    if config.resize != "refuse" and config.start_from is None:
        raise UserError(f"resize={config.resize} needs start_from: name the run to start from")
    check_optimizer(config.optimizer)
    check_tracking(config.tracking)


def _at_least(key: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise UserError(f"{key} must be at least {lowest}, got {value}")
