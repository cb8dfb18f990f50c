"""What a run is: typed, checked, and named by what it contains."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import micro
import models
from experiments.config.errors import UserError, suggestion
from experiments.config.identity import NEUTRAL
from experiments.config.optimizers import OptimizerConfig, check_optimizer
from experiments.config.slurm_settings import SlurmConfig, check_slurm
from experiments.tracking.wandb_mirror import TrackingConfig, check_tracking
from micro.ddp import scoped
from micro.planning.schedules.base import Schedule


@dataclass(kw_only=True)
class ModelConfig:
    """A network of models/ and its settings; num_classes is the data set's when not given."""

    name: str
    num_classes: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DatasetConfig:
    """A data set of data/, where its files are, and how batches are made of it.

    Attributes:
        augment: of images: how the training images are varied.
        sequence_length: of text: words of a sample, after which gradients are cut off.
        negatives: of interactions: items not taken that are drawn beside each one that was.
    """

    name: str
    root: str | None = None
    augment: str = "none"
    sequence_length: int | None = None
    negatives: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SparsifierConfig:
    """A composition of selector, exchange, codec, index codec and feedback, or a reducer that is none.

    Each part is a name, or a mapping of ``name`` and settings. The policy says how the density changes from layer to
    layer and with time; without one, density and density_warmup do.
    """

    name: str
    reducer: Any = "sparse"
    selector: Any = None
    exchange: Any = "union"
    codec: Any = "raw"
    indices: Any = "int32"
    feedback: Any = "residual"
    policy: Any = None

    @property
    def is_dense(self) -> bool:
        """Whether this is the baseline that sends everything."""
        return part_name(self.reducer) == "dense"

    @property
    def sends_everything(self) -> bool:
        """Whether every element is in the update: the density is 1, whatever is asked for."""
        return part_name(self.reducer) in ("dense", "powersgd") or part_name(self.selector) == "everything"


@dataclass(kw_only=True)
class ClusterConfig:
    """Where the workers are: local or nodes (processes), or simulated in one process."""

    name: str
    nproc_per_node: int = 1
    nnodes: int = 1
    rdzv_endpoint: str = "localhost:0"
    world_size: int | None = None
    device: str = "auto"
    num_threads: int | None = None
    max_restarts: int = 0
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def simulated(self) -> bool:
        """Whether all workers live in one process."""
        return self.name == "simulated"


@dataclass(kw_only=True)
class ScheduleConfig:
    """Which gradients travel together: a schedule of micro.planning.schedules with its settings, or auto.

    The files are what `experiments.profile` measured, for the schedules that plan from it.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None
    link: str | None = None
    select: str | None = None


@dataclass(kw_only=True)
class WarmupConfig:
    """A density that starts higher: over how many steps it falls, from where, and in how many stairs."""

    steps: int = 0
    start: float = 0.25
    stages: int = 0


@dataclass(kw_only=True)
class CheckpointConfig:
    """How often a run saves all that it needs to go on: every so many seconds or steps, 0 for never by this measure."""

    every_s: float = 300.0
    every_steps: int = 0
    keep: int = 2


@dataclass(kw_only=True)
class TrainConfig:
    """One run. The values stand in conf/; see conf/train.yaml for what each means."""

    model: ModelConfig
    dataset: DatasetConfig
    sparsifier: SparsifierConfig
    schedule: ScheduleConfig
    cluster: ClusterConfig
    optimizer: OptimizerConfig
    scale: str
    scope: str
    density: float
    density_warmup: WarmupConfig
    seed: int
    epochs: int
    batch_size: int
    lr: float
    lr_shape: str
    lr_warmup_epochs: float
    lr_warmup_start: float
    lr_milestones: list[float]
    lr_decay: float
    accumulate: int
    precision: str
    channels_last: bool
    compile: bool
    nonfinite: str
    timed: bool
    measure_residual_every: int = 0
    checkpoint: CheckpointConfig
    start_from: str | None
    resize: str
    save_weights: bool
    output: str
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        assert self.cluster.world_size is not None
        return self.cluster.world_size


SCALES = ("paper", "small")
SHAPES = ("steps", "linear", "cosine")
PRECISIONS = ("float32", "bfloat16")
RESIZES = ("refuse", "average")


def typed(composed: DictConfig, *, joined_world_size: int | None = None) -> TrainConfig:
    """Return the configuration as dataclasses, checked as far as can be without reading data.

    Args:
        composed: what hydra composed.
        joined_world_size: the number of ranks this process is one of, when something else started them.

    Raises:
        UserError: a key that does not exist, a value missing or out of range, or parts that do not go together.
    """
    _refuse_unknown_keys(composed, TrainConfig, "")
    schema = OmegaConf.structured(TrainConfig)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema, composed))
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, TrainConfig)
    _settle_cluster(config.cluster, joined_world_size)
    if config.sparsifier.sends_everything:
        config.density = 1.0
    _check_numbers(config)
    reducer = build_reducer(config)
    _refuse_second_momentum(config, reducer)
    _check_schedule(config, reducer)
    return config


def build_model(config: TrainConfig, sizes: dict[str, int]) -> torch.nn.Module:
    """Return the model for data of these sizes; see data.DatasetInfo.

    Raises:
        ValueError: no such model or setting, a model for other data, or fewer outputs than classes.
    """
    outputs, classes = config.model.num_classes, sizes.get("num_classes")
    if outputs is not None:
        if classes is None:
            raise ValueError(
                f"model.num_classes is {outputs}, dataset {config.dataset.name} has no classes: leave it out"
            )
        if outputs < classes:
            raise ValueError(f"model.num_classes is {outputs}, dataset {config.dataset.name} has {classes} classes")
        sizes = {**sizes, "num_classes": outputs}
    return models.build(config.model.name, sizes=sizes, **config.model.settings)


def part_name(spec: Any) -> str | None:
    """Return the name of a part that is given as a name or as a mapping."""
    return spec.get("name") if isinstance(spec, dict) else spec


def build_reducer(config: TrainConfig, *, steps_per_epoch: int = 1) -> micro.Reducer:
    """Return the reducer that the configuration describes.

    Args:
        steps_per_epoch: what a density policy counts epochs in.

    Raises:
        UserError: a part that does not exist, a value out of range, or parts that do not go together.
    """
    parts, common = config.sparsifier, {"nonfinite": config.nonfinite, "seed": config.seed}
    try:
        if parts.reducer != "sparse":
            _refuse_parts(config)
            return micro.build(micro.Reducer, parts.reducer, density=_density(config, steps_per_epoch), **common)
        if parts.selector is None:
            raise UserError("sparsifier.selector is missing: say which indices to send, or choose sparsifier=dense")
        return micro.SparseReducer(
            selector=micro.build(micro.Selector, parts.selector),
            density=_density(config, steps_per_epoch),
            exchange=micro.build(micro.Exchange, parts.exchange),
            codec=micro.build(micro.Codec, parts.codec),
            indices=micro.build(micro.IndexCodec, parts.indices),
            feedback=micro.build(micro.Feedback, _feedback(config)),
            **common,  # type: ignore[arg-type]
        )
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from None


def to_yaml(config: TrainConfig) -> str:
    """Return the configuration as yaml, complete."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(path: Path) -> TrainConfig:
    """Return the configuration that ``to_yaml`` wrote."""
    loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(path)))
    assert isinstance(loaded, TrainConfig)
    return loaded


def run_name(config: TrainConfig) -> str:
    """Return the run's folder name: readable, and ending in a hash of everything but paths."""
    plain = dataclasses.asdict(config)
    for path in NEUTRAL:
        *groups, key = path.split(".")
        holder = plain
        for group in groups:
            holder = holder[group]
        del holder[key]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]
    method = f"{config.sparsifier.name}-d{config.density:g}"
    return f"{config.model.name}-{config.dataset.name}-{method}-w{config.world_size}-s{config.seed}-{digest}"


def _density(config: TrainConfig, steps_per_epoch: int) -> micro.Density[Any]:
    warmup, policy = config.density_warmup, config.sparsifier.policy
    if policy is not None:
        if warmup.steps:
            raise UserError(
                f"density_warmup.steps is {warmup.steps}, but sparsifier.policy sets the density: leave one"
            )
        return micro.build(micro.Density, _in_steps(policy, config, steps_per_epoch), density=config.density)
    if not warmup.steps:
        return micro.Constant(config.density)
    return micro.WarmUp(density=config.density, start_density=warmup.start, steps=warmup.steps, stages=warmup.stages)


def _in_steps(policy: dict[str, Any], config: TrainConfig, steps_per_epoch: int) -> dict[str, Any]:
    """Return a policy's settings in steps and densities, from epochs and factors on the density asked for."""
    settings = dict(policy)
    if "interval_epochs" in settings:
        settings["interval"] = max(1, round(settings.pop("interval_epochs") * steps_per_epoch))
    if "high_factor" in settings:
        settings["high"] = min(1.0, settings.pop("high_factor") * config.density)
    if settings.get("name") == "accordion":
        settings.setdefault("decays", tuple(round(epoch * steps_per_epoch) for epoch in config.lr_milestones))
    return settings


def _refuse_second_momentum(config: TrainConfig, reducer: micro.Reducer) -> None:
    chosen = config.optimizer
    if chosen.momentum_at == "gradient" or not chosen.momentum:
        return
    if isinstance(reducer, micro.SparseReducer) and reducer.feedback.name == "momentum":
        given = f"feedback momentum holds the momentum, got optimizer.momentum={chosen.momentum:g} too"
        remedy = "set optimizer.momentum=0" + (" optimizer.nesterov=none" if chosen.nesterov != "none" else "")
        raise UserError(f"sparsifier.{given}: {remedy}")


def _feedback(config: TrainConfig) -> Any:
    """Return what stays on each worker: the sparsifier's word for it, unless the momentum is put before it."""
    given, chosen = config.sparsifier.feedback, config.optimizer
    if chosen.momentum_at == "update":
        return given
    if part_name(given) != "residual":
        raise UserError(
            f"optimizer.momentum_at=gradient takes the place of feedback residual, got '{part_name(given)}': "
            "use momentum_at=update"
        )
    if chosen.nesterov == "published":
        raise UserError("optimizer.nesterov=published is a step of the average: use momentum_at=update")
    return {"name": "momentum", "momentum": chosen.momentum, "nesterov": chosen.nesterov == "pytorch"}


def _refuse_parts(config: TrainConfig) -> None:
    parts = config.sparsifier
    name = parts.reducer if isinstance(parts.reducer, str) else parts.reducer.get("name")
    for part in ("selector", "exchange", "codec", "indices", "feedback", "policy"):
        if getattr(parts, part) != getattr(SparsifierConfig, part):
            raise UserError(f"sparsifier.{part} means nothing for {name}, got '{getattr(parts, part)}': leave it out")
    if config.optimizer.momentum_at == "gradient":
        raise UserError(f"optimizer.momentum_at=gradient needs a residual, which {name} has not: use update")


def _check_schedule(config: TrainConfig, reducer: micro.Reducer) -> None:
    try:
        scoped(reducer, config.scope)
        schedule = build_schedule(config)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from None
    if schedule is None:
        return
    if config.cluster.simulated:
        raise UserError(f"schedule={config.schedule.name} needs real workers, simulated ones have one bucket: use auto")
    if not schedule.runs:
        raise UserError(f"schedule {schedule.name} can be planned and simulated, but not be carried out by DDP")
    for name in ("trace", "link"):
        if (getattr(config.schedule, name) is None) == schedule.is_planned:
            wrong = "is missing: measure it with experiments.profile" if schedule.is_planned else "means nothing here"
            raise UserError(f"schedule.{name} {wrong} (schedule {schedule.name})")


def build_schedule(config: TrainConfig) -> Schedule | None:
    """Return the schedule that the configuration names, or None for auto.

    Raises:
        ValueError: no such schedule, or a setting that it does not have.
    """
    given = config.schedule
    if given.name == "auto":
        if given.settings or given.trace or given.link or given.select:
            raise ValueError("schedule auto has no settings and reads no files: choose another, or leave them out")
        return None
    return micro.build(Schedule, {"name": given.name, **given.settings})


def choice(key: str, known: dict[str, Any], given: str) -> Any:
    """Return what ``given`` names among ``known``, or raise UserError with what is allowed."""
    if given not in known:
        raise UserError(f"{key} must be one of {', '.join(known)}, got '{given}'{suggestion(given, known)}")
    return known[given]


def _refuse_unknown_keys(given: DictConfig, schema: type, prefix: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for key in map(str, given):
        if key not in fields:
            raise UserError(f"'{prefix}{key}' is not a key of the configuration{suggestion(key, fields)}")
        kind = fields[key].type
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if not OmegaConf.is_dict(given[key]):
                raise UserError(f"'{prefix}{key}' is missing: choose one, for instance {prefix}{key}=NAME")
            _refuse_unknown_keys(given[key], kind, f"{prefix}{key}.")
    missing = [name for name in fields if name not in given and fields[name].default is dataclasses.MISSING]
    missing = [name for name in missing if fields[name].default_factory is dataclasses.MISSING]
    if missing:
        raise UserError(f"'{prefix}{missing[0]}' is missing from the configuration")


def _settle_cluster(cluster: ClusterConfig, joined_world_size: int | None) -> None:
    """Check the numbers of the cluster and fill in its world size."""
    _at_least("cluster.nproc_per_node", cluster.nproc_per_node, 1)
    _at_least("cluster.nnodes", cluster.nnodes, 1)
    if cluster.num_threads is not None:
        _at_least("cluster.num_threads", cluster.num_threads, 1)
    if cluster.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"cluster.device must be one of auto, cpu, cuda, got '{cluster.device}'")
    check_slurm(cluster.slurm)
    if cluster.simulated:
        if cluster.world_size is None:
            raise UserError("cluster.world_size is missing: say how many workers to simulate")
        _at_least("cluster.world_size", cluster.world_size, 1)
        return
    if cluster.nnodes > 1 and not joined_world_size and cluster.rdzv_endpoint.endswith(":0"):
        raise UserError(
            f"cluster.rdzv_endpoint must be host:port of one of {cluster.nnodes} nodes, got '{cluster.rdzv_endpoint}'"
        )
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
        choice(key, dict.fromkeys(known), getattr(config, key))
    if config.lr_shape != "steps" and config.lr_milestones:
        raise UserError(f"lr_milestones are of lr_shape=steps, got {config.lr_milestones} for {config.lr_shape}")
    if config.resize != "refuse" and config.start_from is None:
        raise UserError(f"resize={config.resize} needs start_from: name the run to go on from")
    check_optimizer(config.optimizer)
    check_tracking(config.tracking)


def _at_least(key: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise UserError(f"{key} must be at least {lowest}, got {value}")
