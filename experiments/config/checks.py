"""Check the settings of a run and fill in defaults that depend on others, before parts are built.

schema.py has the range of each setting. ``NEEDS`` lists settings that only have an effect under a condition: without it
they must have their defaults, because an ignored value would go unnoticed.
"""

import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError, shown
from experiments.config.identity import complete_digests
from experiments.config.keys import defaults_of_schema, flat, limits
from experiments.config.ranges import PATH, host_and_port
from experiments.config.schema import IN_JOB, LAUNCH, TIME, ClusterConfig, RoundsConfig, SlurmConfig, TrainConfig

_GPU_FILES = ("nvidiactl", "dxg", "kfd")  # device files of NVIDIA, WSL and AMD; without one torch finds no GPU
_GPUS_ALONE = ("--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket")  # take [TYPE:]NUMBER
_GPUS = (*_GPUS_ALONE, "--gres", "--tres-per-task")  # the last two take gpu:[TYPE:]NUMBER; a job has one task per node
_OF_ROUNDS = " ".join(f"rounds.{key}" for key in vars(RoundsConfig()) if key != "every")
_NO_ROUNDS = "does not go with rounds.every"
_NONE_LOST = "does not go with rounds.lost_workers=go_on"
_MOMENTUM = "needs a momentum above 0"

# Keys, whether another value than the default is allowed, and otherwise the message after KEY=VALUE.
NEEDS: tuple[tuple[str, Callable[[TrainConfig], Any], str], ...] = (
    ("lr_end", lambda c: c.lr_shape != "steps", "is for lr_shape=linear and cosine"),
    ("lr_milestones lr_decay", lambda c: c.lr_shape == "steps", "is for lr_shape=steps"),
    ("density_warmup.stages", lambda c: c.density_warmup.steps, "needs density_warmup.steps"),
    ("resize", lambda c: c.start_from is not None, "needs start_from"),
    ("cluster.max_restarts cluster.timeout_s", lambda c: not c.cluster.simulated, "is for real workers"),
    (
        "optimizer.momentum optimizer.nesterov optimizer.momentum_at optimizer.lr_at",
        lambda c: c.optimizer.name == "sgd",
        "is for sgd",
    ),
    ("optimizer.betas", lambda c: c.optimizer.name not in ("sgd", "sign"), "is for adam, adamw, sparse_adamw and muon"),
    (
        "optimizer.max_steps",
        lambda c: c.optimizer.name in ("sparse_adamw", "sign"),
        "is for sparse_adamw and sign",
    ),
    ("optimizer.nesterov", lambda c: c.optimizer.momentum or c.optimizer.nesterov == "published", _MOMENTUM),
    ("optimizer.momentum_at", lambda c: c.optimizer.momentum, _MOMENTUM),
    ("optimizer.clip_at optimizer.clip_norm", lambda c: c.optimizer.clip is not None, "needs optimizer.clip"),
    ("optimizer.clip_norm", lambda c: c.optimizer.clip_at == "gradient", "needs optimizer.clip_at=gradient"),
    (
        "tracking.mode tracking.project tracking.entity tracking.tags",
        lambda c: c.tracking.name != "none",
        "needs tracking=wandb",
    ),
    (_OF_ROUNDS, lambda c: c.rounds.every, "needs rounds.every"),
    ("rounds.nesterov", lambda c: c.rounds.momentum, _MOMENTUM),
    ("resize", lambda c: not c.rounds.every, f"{_NO_ROUNDS}, workers have weights of their own"),
    (
        "optimizer.lr_at optimizer.momentum_at optimizer.clip_at optimizer.clip_norm",
        lambda c: not c.rounds.every,
        f"{_NO_ROUNDS}, where each worker has an optimizer and gradients of its own",
    ),
    ("schedule.name", lambda c: not c.rounds.every, f"{_NO_ROUNDS}, one vector is exchanged at the end of a round"),
    ("rounds.lost_workers", lambda c: not c.cluster.simulated, "is for real workers, no simulated one is lost"),
    (
        "rounds.fragments rounds.delay rounds.mix",
        lambda c: c.rounds.lost_workers == "stop",
        f"{_NONE_LOST}, weights are at no time equal on all ranks",
    ),
    (
        "checkpoint.every_steps",
        lambda c: c.rounds.lost_workers == "stop",
        f"{_NONE_LOST}, which saves at the end of every round",
    ),
)
_DEFAULTS = {**flat(defaults_of_schema()), "schedule.name": "auto"}


def check_settings(config: TrainConfig, *, joined_world_size: int | None = None) -> None:
    """Check every setting; fill in world size, device, digests of files, density of methods that send everything.

    Args:
        joined_world_size: the number of ranks, if torchrun or srun started this process as one of them.

    Raises:
        UserError: a value out of its range, or settings that contradict each other.
    """
    check_values(config)
    _check_lists(config)
    _expand_home(config)
    if config.cluster.device == "auto":
        config.cluster.device = _resolved_device(config.cluster, is_rank=joined_world_size is not None)
    _complete_world_size(config.cluster, joined_world_size, may_lack=config.rounds.lost_workers == "go_on")
    if config.sparsifier.sends_everything:
        config.density = 1.0
    complete_digests(config)
    _check_needs(config)


def check_values(settings: Any, group: str = "") -> None:
    """Check each single setting of a run, or of the group with the dotted name ``group``.

    Raises:
        UserError: a value that is not allowed.
    """
    for key, holder, name, allowed in limits(settings, group):
        value = getattr(holder, name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                allowed.check(key, each)


def num_gpus() -> int:
    """Return how many GPUs this process sees."""
    if sys.platform == "linux" and not any(Path("/dev", name).exists() for name in _GPU_FILES):
        return 0
    import torch  # slow

    return torch.cuda.device_count()


def gpus_of_job(cluster: ClusterConfig) -> int:
    """Return how many GPUs a job of SLURM requests on each node: by gpus_per_node, or by settings of sbatch."""
    slurm, found = cluster.slurm, [cluster.slurm.gpus_per_node]
    for option in slurm.extra:
        name, _, value = option.partition(" " if " " in option else "=")
        if name not in _GPUS:
            continue
        parts = [re.sub(r"^gres[/:]|\(.*", "", part) for part in value.split(",")]
        if name not in _GPUS_ALONE:
            parts = [part.removeprefix("gpu:") for part in parts if part.split(":")[0] == "gpu"]
        numbers = [part.rpartition(":")[2] for part in parts]
        number = sum(int(each) if each.isdecimal() else 1 for each in numbers)
        found.append(-(-number // cluster.nnodes) if name in ("--gpus", "-G") else number)
    return max(found)


def _check_lists(config: TrainConfig) -> None:
    marks, slurm = config.lr_milestones, config.cluster.slurm
    if any(epoch <= 0 for epoch in marks) or any(after <= before for before, after in pairwise(marks)):
        raise UserError(f"lr_milestones must be epochs above 0 in ascending order, got {marks}")
    if len(config.optimizer.betas) != 2:
        raise UserError(f"optimizer.betas must be two numbers in [0, 1), got {config.optimizer.betas}")
    if array := next((option for option in slurm.extra if re.match(r"--array\b|-a", option)), None):
        raise UserError(
            f"cluster.slurm.extra has {array}, and a study makes its own array: leave it out; cluster.slurm.throttle=N "
            "lets N runs go on at once"
        )
    if slurm.time_limit is not None and _seconds(slurm) <= slurm.signal_s:
        given = f"signal_s {slurm.signal_s} and time_limit {slurm.time_limit}"
        raise UserError(f"cluster.slurm.signal_s must be shorter than the time limit, got {given}")


def _seconds(slurm: SlurmConfig) -> int:
    found = re.fullmatch(TIME.pattern, slurm.time_limit or "")
    assert found
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _expand_home(config: TrainConfig) -> None:
    for key, holder, name, allowed in limits(config):
        given = getattr(holder, name)
        if allowed is PATH and given and given.startswith("~"):
            try:
                setattr(holder, name, str(Path(given).expanduser()))
            except RuntimeError:
                raise UserError(f"{key}: there is no home folder for '{given}': write the path without ~") from None


def _resolved_device(cluster: ClusterConfig, *, is_rank: bool) -> str:
    """Return what ``device=auto`` means: cuda if each worker here has its own GPU, otherwise cpu.

    For SLURM it is cuda if the job requests GPUs, so that a run has the same name on every machine. A rank that sees a
    GPU returns auto; the ranks decide together when they have met.
    """
    if gpus_of_job(cluster) or cluster.rdzv_endpoint == IN_JOB or os.environ.get(LAUNCH):
        return "cuda" if gpus_of_job(cluster) else "cpu"
    if is_rank:
        return "auto" if num_gpus() else "cpu"
    return "cuda" if num_gpus() >= (1 if cluster.simulated else cluster.nproc_per_node) else "cpu"


def _complete_world_size(cluster: ClusterConfig, joined: int | None, *, may_lack: bool) -> None:
    """Fill in the world size.

    Args:
        joined: the number of ranks, if torchrun or srun started this process as one of them.
        may_lack: whether fewer ranks than the run has may have been started.
    """
    if cluster.world_size is None and (cluster.simulated or may_lack):
        which = "workers to simulate" if cluster.simulated else "ranks there are at the most (rounds.lost_workers)"
        raise UserError(f"cluster.world_size is missing: say how many {which}")
    if cluster.simulated:
        if joined:
            raise UserError(
                f"cluster=simulated trains in one process, but torchrun or srun started ranks ({joined}): "
                "call it without them"
            )
        return
    if cluster.rdzv_endpoint != IN_JOB:  # ranks that were started do not use it
        host_and_port(cluster.rdzv_endpoint, key="cluster.rdzv_endpoint", nnodes=1 if joined else cluster.nnodes)
    started, given = joined or cluster.nnodes * cluster.nproc_per_node, cluster.world_size
    if may_lack:
        if joined and given and joined > given:
            raise UserError(
                f"cluster.world_size is {given}, but {joined} ranks were started: set it to the number of "
                "ranks that there are at the most, or start fewer"
            )
        return
    if given not in (None, started):
        how = "ranks were started" if joined else "= nnodes x nproc_per_node"
        raise UserError(f"cluster.world_size is {given}, but {started} {how}: leave it out or make them equal")
    cluster.world_size = started


def _check_needs(config: TrainConfig) -> None:
    for keys, is_met, why in NEEDS:
        for key in keys.split():
            *groups, name = key.split(".")
            given = getattr(getattr(config, groups[0]) if groups else config, name)
            if given != _DEFAULTS[key] and not is_met(config):
                value = given if isinstance(given, str) else shown(given)
                raise UserError(f"{key.removesuffix('.name')}={value} {why}: change that, or leave it out")
    for key in ("mode", "project"):
        if config.tracking.name != "none" and not getattr(config.tracking, key):
            raise UserError(f"tracking.{key} is missing: W&B needs one")
