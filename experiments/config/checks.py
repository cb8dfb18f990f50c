"""Check the settings of a run and fill in what they leave open, before parts are built.

``RANGES``, ``CHOICES`` and so on say what each single setting may be; settings that contradict each other are in
combinations.py. Of files only the content is hashed that a run's name says.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.config.combinations import check_combinations
from experiments.config.devices import resolve_device
from experiments.config.digests import FILES, complete_digests
from experiments.config.errors import UserError, check_choice, short
from experiments.config.ranges import (
    COUNT,
    COUNT_OR_NONE,
    DECAY,
    LARGEST_SEED,
    NOT_NEGATIVE,
    ON_A_MACHINE,
    PART,
    POSITIVE,
    SHARE,
    Range,
    check_name,
    check_path,
    host_and_port,
)
from experiments.config.schema import IN_JOB, ClusterConfig, SlurmConfig, TrainConfig

RANGES = {
    "epochs": COUNT,
    "batch_size": COUNT,
    "accumulate": COUNT,
    "seed": Range(0, LARGEST_SEED),
    "lr": POSITIVE,
    "lr_decay": POSITIVE,
    "lr_end": PART,
    "lr_warmup_epochs": NOT_NEGATIVE,
    "lr_warmup_start": NOT_NEGATIVE,
    "peak_tflops": POSITIVE,
    "measure_residual_every": COUNT_OR_NONE,
    "measure_test_every": COUNT_OR_NONE,
    "model.num_classes": COUNT,
    "dataset.sequence_length": COUNT,
    "dataset.negatives": COUNT,
    "density": SHARE,
    "density_warmup.steps": COUNT_OR_NONE,
    "density_warmup.start": SHARE,
    "density_warmup.stages": COUNT_OR_NONE,
    "checkpoint.every_s": NOT_NEGATIVE,
    "checkpoint.every_steps": COUNT_OR_NONE,
    "checkpoint.keep": COUNT,
    "optimizer.momentum": DECAY,
    "optimizer.betas": DECAY,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.clip": POSITIVE,
    "rounds.every": COUNT_OR_NONE,
    "rounds.lr": POSITIVE,
    "rounds.momentum": DECAY,
    "rounds.delay": COUNT_OR_NONE,
    "rounds.mix": SHARE,
    "cluster.nproc_per_node": ON_A_MACHINE,
    "cluster.nnodes": COUNT,
    "cluster.world_size": COUNT,
    "cluster.num_threads": ON_A_MACHINE,
    "cluster.max_restarts": COUNT_OR_NONE,
    "cluster.timeout_s": Range(5, 604_800),  # a beat every quarter of a second at the least; a week
    "cluster.slurm.gpus_per_node": COUNT_OR_NONE,
    "cluster.slurm.cpus_per_worker": COUNT,
    "cluster.slurm.throttle": COUNT,
    "cluster.slurm.signal_s": Range(0, 65_535),  # the largest value of sbatch
    "tracking.finish_s": NOT_NEGATIVE,
}
CHOICES = {
    "scale": ("paper", "small"),
    "lr_shape": ("steps", "linear", "cosine"),
    "precision": ("float32", "bfloat16"),
    "resize": ("refuse", "average"),
    "resume": ("auto", "scratch"),
    "cluster.device": ("auto", "cpu", "cuda"),
    "optimizer.name": ("sgd", "adam", "adamw", "sign"),
    "optimizer.nesterov": ("none", "pytorch", "published"),
    "optimizer.momentum_at": ("update", "gradient"),
    "optimizer.lr_at": ("update", "gradient"),
    "optimizer.decay_of": ("all", "weights", "published"),
    "optimizer.clip_at": ("gradient", "update"),
    "optimizer.clip_norm": ("rank", "global"),
    "rounds.buffers": ("mean", "first", "own"),
    "rounds.lost_workers": ("stop", "go_on"),
    "tracking.name": ("none", "wandb"),
    "tracking.mode": ("offline", "online"),
}
NAMES = ("model.name", "dataset.name", "sparsifier.name", "schedule.name", "cluster.name")
PATHS = ("output", "start_from", "dataset.root", *(f"schedule.{key}" for key in FILES))
TEXTS = {  # what a text must be, and its pattern
    **dict.fromkeys(
        [f"cluster.slurm.{key}" for key in ("partition", "account", "qos", "constraint")],
        ("a name in one line, or null for the site's own", r"[^\n]*\S[^\n]*"),
    ),
    "cluster.slurm.setup": ("lines of shell", r"(?s:.*)"),
    "cluster.slurm.extra": ("settings of sbatch such as --exclusive", r"-[^\n]*"),
    # Only one of sbatch's formats. sbatch would read 10:00 as minutes; YAML reads 1:00:00 without quotes as 3600.
    "cluster.slurm.time_limit": (
        "'hours:minutes:seconds' or 'days-hours:minutes:seconds', in quotes",
        r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})",
    ),
    **dict.fromkeys(  # what W&B refuses
        ["tracking.project", "tracking.entity"],
        (r"a name of at most 128 characters without any of /\#?%:", r"(?=.*\S)[^/\\#?%:\x00-\x1f\x7f]{1,128}"),
    ),
    "tracking.tags": ("words of 1 to 64 characters", r"(?s:.{1,64})"),
}


def check_settings(config: TrainConfig, *, joined_world_size: int | None = None) -> None:
    """Check every setting; fill in world size, device, digests of files, density of methods that send everything.

    Args:
        joined_world_size: the number of ranks, if torchrun or srun started this process as one of them.

    Raises:
        UserError: a value out of its range, or settings that contradict each other.
    """
    check_values(config)
    _expand_home(config)
    _complete_cluster(config.cluster, joined_world_size, may_lack=config.rounds.lost_workers == "go_on")
    if config.sparsifier.sends_everything:
        config.density = 1.0
    complete_digests(config)
    check_combinations(config)


def check_values(settings: Any, group: str = "") -> None:
    """Check each setting by itself, of a run or of one of its groups. Raises: UserError.

    Args:
        group: the dotted name of ``settings`` in a run, empty for all.
    """
    checks: dict[str, Callable[[str, Any], None]] = {
        **dict.fromkeys(NAMES, check_name),
        **dict.fromkeys(PATHS, check_path),
        **{key: allowed.check for key, allowed in RANGES.items()},
        **dict.fromkeys(CHOICES, lambda key, given: check_choice(key, CHOICES[key], given)),
        **dict.fromkeys(TEXTS, _check_text),
    }
    for key, check in checks.items():
        if key.startswith(group):
            value = _value(settings, key.removeprefix(group).strip("."))
            for each in value if isinstance(value, list) else [value]:
                if each is not None:
                    check(key, each)
    if not group:
        _check_lists(settings)


def _check_text(key: str, given: Any) -> None:
    if not (isinstance(given, str) and re.fullmatch(TEXTS[key][1], given)):
        raise UserError(f"{key} must be {TEXTS[key][0]}, got {short(str(given))!r}")


def _value(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


def _check_lists(config: TrainConfig) -> None:
    marks = config.lr_milestones
    if any(epoch <= 0 for epoch in marks) or any(after <= before for before, after in pairwise(marks)):
        raise UserError(f"lr_milestones must be epochs above 0 in ascending order, got {marks}")
    if len(config.optimizer.betas) != 2:
        raise UserError(f"optimizer.betas must be two numbers in [0, 1), got {config.optimizer.betas}")
    slurm = config.cluster.slurm
    if slurm.time_limit is not None and _seconds(slurm) <= slurm.signal_s:
        given = f"signal_s {slurm.signal_s} and time_limit {slurm.time_limit}"
        raise UserError(f"cluster.slurm.signal_s must be shorter than the time limit, got {given}")


def _seconds(slurm: SlurmConfig) -> int:
    found = re.fullmatch(TEXTS["cluster.slurm.time_limit"][1], slurm.time_limit or "")
    assert found
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _expand_home(config: TrainConfig) -> None:
    for key in PATHS:
        *group, name = key.split(".")
        holder = _value(config, group[0]) if group else config
        given = getattr(holder, name)
        if given and given.startswith("~"):
            try:
                setattr(holder, name, str(Path(given).expanduser()))
            except RuntimeError:
                raise UserError(f"{key}: there is no home folder for '{given}': write the path without ~") from None


def _complete_cluster(cluster: ClusterConfig, joined: int | None, *, may_lack: bool) -> None:
    """Fill in the device and the world size.

    Args:
        joined: the number of ranks, if torchrun or srun started this process as one of them.
        may_lack: whether fewer ranks than the run has in all may have been started.
    """
    if cluster.device == "auto":
        cluster.device = resolve_device(cluster, is_rank=joined is not None)
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
    if cluster.rdzv_endpoint != IN_JOB:
        nnodes = 1 if joined else cluster.nnodes  # ranks that were started do not use it
        host_and_port(cluster.rdzv_endpoint, key="cluster.rdzv_endpoint", nnodes=nnodes)
    started = joined or cluster.nnodes * cluster.nproc_per_node
    if may_lack:
        if joined and joined > (cluster.world_size or joined):
            raise UserError(
                f"cluster.world_size is {cluster.world_size}, but {joined} ranks were started: set it to the number of "
                "ranks that there are at the most, or start fewer"
            )
        return
    if cluster.world_size not in (None, started):
        how = "ranks were started" if joined else "= nnodes x nproc_per_node"
        raise UserError(
            f"cluster.world_size is {cluster.world_size}, but {started} {how}: leave it out or make them equal"
        )
    cluster.world_size = started
