"""Build the parts that a configuration names: model, reducer, schedule. Checks that need these parts are here too.

The only module of this package that imports torch and micro.
"""

from typing import Any

import torch

import micro
import models
from experiments.config.errors import UserError, one_line, shown
from experiments.config.ranges import MOST
from experiments.config.schema import SparsifierConfig, TrainConfig, part_name
from micro.density.constant import Constant
from micro.local.checks import check_method
from micro.local.regrouping import check_losable
from micro.planning.schedules.base import Schedule
from micro.reducers.wrapping import innermost, layers
from micro.scope import scoped

WRAPPING = ("split", "two_level")  # reducers that have the sparsifier's composition inside


def check_parts(config: TrainConfig) -> None:
    """Build reducer and schedule once, and refuse parts that do not go together.

    Raises:
        UserError: a part that does not exist, a value out of range, or parts that do not go together.
    """
    reducer = build_reducer(config)
    _refuse_second_momentum(config, reducer)
    _check_schedule(config, reducer)
    _check_rounds(config, reducer)


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


def build_reducer(config: TrainConfig, *, steps_per_epoch: int = 1) -> micro.Reducer:
    """Return the reducer that the configuration describes.

    Args:
        steps_per_epoch: converts the epochs of a density policy to steps.

    Raises:
        UserError: a part that does not exist, a value out of range, or parts that do not go together.
    """
    parts, common = config.sparsifier, {"nonfinite": config.nonfinite, "seed": config.seed}
    try:
        if part_name(parts.reducer) not in ("sparse", *WRAPPING):
            whole = micro.build(micro.Reducer, parts.reducer, density=_density(config, steps_per_epoch), **common)
            _refuse_parts(config)
            return whole
        sparse = _composed(config, steps_per_epoch, common)
        reducer = _around(sparse, parts.reducer)
        _check_nodes(reducer, config)
        return reducer
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(one_line(error)) from None


def _composed(config: TrainConfig, steps_per_epoch: int, common: dict[str, Any]) -> micro.SparseReducer:
    """Return the composition of the sparsifier's parts."""
    parts = config.sparsifier
    if parts.selector is None:
        raise UserError("sparsifier.selector is missing: say which indices to send, or choose sparsifier=dense")
    return micro.SparseReducer(
        selector=micro.build(micro.Selector, parts.selector),
        density=_density(config, steps_per_epoch),
        exchange=micro.build(micro.Exchange, parts.exchange),
        codec=micro.build(micro.Codec, parts.codec),
        indices=micro.build(micro.IndexCodec, parts.indices),
        feedback=micro.build(micro.Feedback, _feedback(config)),
        **common,
    )


def _around(sparse: micro.Reducer, spec: Any) -> micro.Reducer:
    """Return ``sparse`` with the reducers of ``spec`` around it; a mapping may name the next one, its ``reducer``."""
    if spec == "sparse":
        return sparse
    if part_name(spec) not in WRAPPING:
        raise UserError(f"reducer of a sparsifier's reducer must be sparse, {' or '.join(WRAPPING)}, got '{spec}'")
    settings = dict(spec) if isinstance(spec, dict) else {"name": spec}
    return micro.build(micro.Reducer, settings, reducer=_around(sparse, settings.pop("reducer", "sparse")))


def _check_nodes(reducer: micro.Reducer, config: TrainConfig) -> None:
    for layer in layers(reducer):
        if isinstance(layer, micro.TwoLevel) and config.world_size % layer.ranks_per_node:
            raise UserError(
                f"ranks_per_node of sparsifier {config.sparsifier.name} must divide the number of workers, "
                f"got {layer.ranks_per_node} for {config.world_size}"
            )


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


def _density(config: TrainConfig, steps_per_epoch: int) -> micro.Density[Any]:
    warmup, policy = config.density_warmup, config.sparsifier.policy
    if policy is not None:
        if warmup.steps:
            raise UserError(
                f"density_warmup.steps is {warmup.steps}, but sparsifier.policy sets the density: leave one"
            )
        return micro.build(micro.Density, _in_steps(policy, config, steps_per_epoch), density=config.density)
    if not warmup.steps:
        return Constant(config.density)
    return micro.WarmUp(density=config.density, start_density=warmup.start, steps=warmup.steps, stages=warmup.stages)


def _in_steps(policy: Any, config: TrainConfig, steps_per_epoch: int) -> Any:
    """Return a policy's settings in steps and densities, from epochs and factors of the configured density."""
    if not isinstance(policy, dict):
        return policy
    settings = dict(policy)
    if "interval_epochs" in settings:
        settings["interval"] = max(1, round(_positive("interval_epochs", settings) * steps_per_epoch))
    if "high_factor" in settings:
        settings["high"] = min(1.0, _positive("high_factor", settings) * config.density)
    if settings.get("name") == "accordion":
        settings.setdefault("decays", tuple(round(epoch * steps_per_epoch) for epoch in config.lr_milestones))
    return settings


def _positive(key: str, settings: dict[str, Any]) -> float:
    """Take a number above 0 out of the settings of a policy."""
    value = settings.pop(key)
    if type(value) not in (int, float) or not 0 < value <= MOST:
        raise UserError(f"sparsifier.policy.{key} must be a number above 0, at most {MOST}, got {shown(value)}")
    return float(value)


def _refuse_second_momentum(config: TrainConfig, reducer: micro.Reducer) -> None:
    chosen = config.optimizer
    if chosen.momentum_at == "gradient" or not chosen.momentum:
        return
    method = innermost(reducer)
    if isinstance(method, micro.SparseReducer) and method.feedback.name == "momentum":
        given = f"feedback momentum holds the momentum, got optimizer.momentum={chosen.momentum:g} too"
        remedy = "set optimizer.momentum=0" + (" optimizer.nesterov=none" if chosen.nesterov != "none" else "")
        raise UserError(f"sparsifier.{given}: {remedy}")


def _feedback(config: TrainConfig) -> Any:
    """Return the feedback: the sparsifier's own, or a local momentum with optimizer.momentum_at=gradient."""
    given, chosen = config.sparsifier.feedback, config.optimizer
    if chosen.momentum_at == "update":
        return given
    if part_name(given) != "residual":
        raise UserError(
            f"optimizer.momentum_at=gradient replaces feedback residual, got '{part_name(given)}': "
            "use momentum_at=update"
        )
    if isinstance(given, dict) and given.get("decay", 1.0) != 1.0:
        raise UserError(
            f"optimizer.momentum_at=gradient replaces feedback residual, got decay={shown(given['decay'])}: "
            "use momentum_at=update"
        )
    if chosen.nesterov == "published":
        raise UserError("optimizer.nesterov=published works on the averaged gradient: use momentum_at=update")
    return {"name": "momentum", "momentum": chosen.momentum, "nesterov": chosen.nesterov == "pytorch"}


def _refuse_parts(config: TrainConfig) -> None:
    parts = config.sparsifier
    name = part_name(parts.reducer)
    for part in ("selector", "exchange", "codec", "indices", "feedback", "policy"):
        if getattr(parts, part) != getattr(SparsifierConfig, part):
            raise UserError(f"sparsifier.{part} means nothing for {name}, got '{getattr(parts, part)}': leave it out")
    if config.optimizer.momentum_at == "gradient":
        raise UserError(f"optimizer.momentum_at=gradient needs a residual, and {name} has none: use update")


def _check_rounds(config: TrainConfig, reducer: micro.Reducer) -> None:
    """Refuse a method that does not go with local steps, or with lost workers, and outer momentum beside a residual."""
    rounds = config.rounds
    if not rounds.every:
        return
    try:
        check_method(reducer)
        if rounds.lost_workers == "go_on":
            check_losable(reducer)
    except ValueError as error:
        raise UserError(str(error)) from None
    smallest = micro.Layout(("weights",), ((8, 8),))
    kept = innermost(reducer).start(smallest, torch.float32, torch.device("cpu")).residual
    if rounds.momentum and kept.numel() and not rounds.momentum_with_feedback:
        raise UserError(
            f"rounds.momentum={rounds.momentum:g} and the residual of {config.sparsifier.name} both add up what was "
            "not applied at once: set rounds.momentum=0, or rounds.momentum_with_feedback=true"
        )


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
        raise UserError(f"schedule {schedule.name} can be planned and simulated, but DDP cannot carry it out")
    if schedule.is_planned and any(isinstance(layer, micro.TwoLevel) for layer in layers(reducer)):
        raise UserError(
            f"schedule {schedule.name} plans from a link that was measured in one level, two_level has two: choose "
            "schedule=layerwise, single, capped or ddp"
        )
    for name in ("trace", "link"):
        if (getattr(config.schedule, name) is None) == schedule.is_planned:
            wrong = "is missing: measure it with experiments.profile" if schedule.is_planned else "means nothing here"
            raise UserError(f"schedule.{name} {wrong} (schedule {schedule.name})")
