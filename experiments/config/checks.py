"""Check the settings of a run, without building parts; of files only the content is hashed that a run's name says."""

import hashlib
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.config.devices import resolve_device
from experiments.config.digests import FILES, complete_digests
from experiments.config.endpoints import host_and_port
from experiments.config.errors import UserError, check_choice
from experiments.config.optimizer_settings import check_optimizer
from experiments.config.ranges import LARGEST_SEED, MOST_ON_A_MACHINE, check_count, check_name, check_path
from experiments.config.rounds_settings import check_rounds
from experiments.config.schema import OWN_DATA, TIMEOUT_S, ClusterConfig, DatasetConfig, TrainConfig, WarmupConfig
from experiments.config.slurm_settings import IN_JOB, check_slurm
from experiments.config.tracking_settings import check_tracking

DEVICES = ("auto", "cpu", "cuda")
SCALES = ("paper", "small")
SHAPES = ("steps", "linear", "cosine")
PRECISIONS = ("float32", "bfloat16")
RESIZES = ("refuse", "average")
RESUMES = ("auto", "scratch")
TIMEOUTS_S = (5.0, 604_800.0)  # a beat every quarter of a second at the least; a week


def check_settings(config: TrainConfig, *, joined_world_size: int | None = None) -> None:
    """Check every setting; fill in world size, device, digests of files, density of methods that send everything.

    Args:
        joined_world_size: the number of ranks, if torchrun or srun started this process as one of them.

    Raises:
        UserError: a value out of its range, or settings that contradict each other.
    """
    _complete_cluster(config.cluster, joined_world_size, may_lack=config.rounds.lost_workers == "go_on")
    if config.sparsifier.sends_everything:
        config.density = 1.0
    _check_names(config)
    _check_paths(config)
    _expand_home(config)
    _complete_dataset(config.dataset)
    complete_digests(config)
    _check_numbers(config)


def _check_names(config: TrainConfig) -> None:
    for group in ("model", "dataset", "sparsifier", "schedule", "cluster"):
        check_name(f"{group}.name", getattr(config, group).name)


def _paths(config: TrainConfig) -> Iterator[tuple[str, Any, str]]:
    """Yield each setting that is a path: its dotted name, what holds it, and its name there."""
    yield from (("output", config, "output"), ("start_from", config, "start_from"))
    yield "dataset.root", config.dataset, "root"
    yield from ((f"schedule.{key}", config.schedule, key) for key in FILES)


def _check_paths(config: TrainConfig) -> None:
    for name, holder, key in _paths(config):
        if getattr(holder, key) is not None:
            check_path(name, getattr(holder, key))


def _expand_home(config: TrainConfig) -> None:
    for name, holder, key in _paths(config):
        given = getattr(holder, key)
        if given and given.startswith("~"):
            try:
                setattr(holder, key, str(Path(given).expanduser()))
            except RuntimeError:
                raise UserError(f"{name}: there is no home folder for '{given}': write the path without ~") from None


def _complete_dataset(dataset: DatasetConfig) -> None:
    """Fill in the digest of a user's own data, where it is there; without it, it is missed before a worker starts."""
    if dataset.name not in OWN_DATA or dataset.root is None or not Path(dataset.root).is_dir():
        return
    import data  # imports torch

    try:
        sums = data.sums(dataset.name, dataset.root, **dataset.settings)
    except ValueError:
        return
    found = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:12]
    if dataset.digest not in (None, found):
        raise UserError(
            f"dataset.digest is {dataset.digest}, the data in {dataset.root} has {found}: "
            "name the folder of that data as dataset.root, or leave dataset.digest out"
        )
    dataset.digest = found


def _complete_cluster(cluster: ClusterConfig, joined_world_size: int | None, *, may_lack: bool) -> None:
    """Check the numbers of the cluster and fill in its world size.

    Args:
        may_lack: whether fewer ranks than the run has in all may have been started.
    """
    check_count("cluster.nproc_per_node", cluster.nproc_per_node, 1, MOST_ON_A_MACHINE)
    check_count("cluster.nnodes", cluster.nnodes, 1)
    if cluster.num_threads is not None:
        check_count("cluster.num_threads", cluster.num_threads, 1, MOST_ON_A_MACHINE)
    lowest, highest = TIMEOUTS_S
    if not lowest <= cluster.timeout_s <= highest:
        raise UserError(f"cluster.timeout_s must be in [{lowest:g}, {highest:,.0f}] seconds, got {cluster.timeout_s:g}")
    check_choice("cluster.device", DEVICES, cluster.device)
    check_slurm(cluster.slurm)
    if cluster.device == "auto":
        cluster.device = resolve_device(cluster, is_rank=joined_world_size is not None)
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
        check_count("cluster.world_size", cluster.world_size, 1)
        return
    if cluster.rdzv_endpoint != IN_JOB:
        nnodes = 1 if joined_world_size else cluster.nnodes  # ranks that were started do not use it
        host_and_port(cluster.rdzv_endpoint, key="cluster.rdzv_endpoint", nnodes=nnodes)
    if may_lack:
        _check_joined(cluster.world_size, joined_world_size)
        return
    started = joined_world_size or cluster.nnodes * cluster.nproc_per_node
    if cluster.world_size not in (None, started):
        how = "ranks were started" if joined_world_size else "= nnodes x nproc_per_node"
        raise UserError(
            f"cluster.world_size is {cluster.world_size}, but {started} {how}: leave it out or make them equal"
        )
    cluster.world_size = started


def _check_joined(world_size: int | None, joined: int | None) -> None:
    """Check how many ranks a run has that goes on when some are lost, and how many of them were started."""
    if world_size is None:
        raise UserError(
            "cluster.world_size is missing: with rounds.lost_workers=go_on say how many ranks there are at the most"
        )
    check_count("cluster.world_size", world_size, 1)
    if joined and joined > world_size:
        raise UserError(
            f"cluster.world_size is {world_size}, but {joined} ranks were started: set it to the number of ranks that "
            "there are at the most, or start fewer"
        )


def _check_numbers(config: TrainConfig) -> None:
    lowest = {"epochs": 1, "batch_size": 1, "accumulate": 1}
    for key, value in lowest.items():
        check_count(key, getattr(config, key), value)
    check_count("seed", config.seed, 0, LARGEST_SEED)
    _check_warmup(config.density_warmup)
    if config.model.num_classes is not None:
        check_count("model.num_classes", config.model.num_classes, 1)
    check_count("measure_residual_every", config.measure_residual_every, 0)
    check_count("measure_test_every", config.measure_test_every, 0)
    check_count("checkpoint.every_steps", config.checkpoint.every_steps, 0)
    check_count("checkpoint.keep", config.checkpoint.keep, 1)
    check_count("cluster.max_restarts", config.cluster.max_restarts, 0)
    if config.cluster.max_restarts and config.cluster.simulated:
        raise UserError("cluster.max_restarts restarts real workers, simulated ones have none: leave it out")
    if config.peak_tflops is not None and not 0 <= config.peak_tflops < math.inf:
        raise UserError(f"peak_tflops must be at least 0, got {config.peak_tflops:g}: 0 has it measured")
    for key in ("lr_warmup_epochs", "lr_warmup_start"):
        value = getattr(config, key)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{key} must be at least 0, got {value}")
    for key in ("lr", "lr_decay"):
        value = getattr(config, key)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{key} must be positive, got {value}")
    if not 0 <= config.lr_end <= 1:
        raise UserError(f"lr_end must be in [0, 1], got {config.lr_end}")
    if config.lr_shape == "steps" and config.lr_end:
        raise UserError(f"lr_end is for lr_shape=linear and cosine, got {config.lr_end:g} for steps: leave it out")
    if not config.checkpoint.every_s >= 0:
        raise UserError(f"checkpoint.every_s must be at least 0, got {config.checkpoint.every_s}")
    for key, known in {"scale": SCALES, "lr_shape": SHAPES, "precision": PRECISIONS, "resize": RESIZES}.items():
        check_choice(key, known, getattr(config, key))
    check_choice("resume", RESUMES, config.resume)
    _check_milestones(config.lr_milestones)
    if config.lr_shape != "steps" and config.lr_milestones:
        raise UserError(f"lr_milestones are for lr_shape=steps, got {config.lr_milestones} for {config.lr_shape}")
    if config.resize != "refuse" and config.start_from is None:
        raise UserError(f"resize={config.resize} needs start_from: name the run to start from")
    check_optimizer(config.optimizer)
    check_rounds(config)
    check_tracking(config.tracking)


def _check_warmup(warmup: WarmupConfig) -> None:
    check_count("density_warmup.steps", warmup.steps, 0)
    if not 0 < warmup.start <= 1:
        raise UserError(f"density_warmup.start must be in (0, 1], got {warmup.start}")
    check_count("density_warmup.stages", warmup.stages, 0)


def _check_milestones(milestones: list[float]) -> None:
    if any(epoch <= 0 for epoch in milestones) or any(after <= before for before, after in pairwise(milestones)):
        raise UserError(f"lr_milestones must be epochs above 0 in ascending order, got {milestones}")
