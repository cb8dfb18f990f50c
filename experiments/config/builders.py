"""Build the configured parts (model, reducer, schedule), with the checks that need these parts.

The only module of this package that imports torch and micro.
"""

from typing import Any

import torch

import micro
import models
from experiments.config.errors import UserError, as_user_error, shown
from experiments.config.schema import SparsifierConfig, TrainConfig, part_name
from experiments.planning.schedules.base import Schedule
from micro.density.base import Constant
from micro.local.checks import check_method
from micro.local.regrouping import check_losable
from micro.reducers.scope import scoped
from micro.reducers.wrapping import innermost, layers

WRAPPING = ("split", "two_level")  # reducers around the sparsifier's composition


def check_parts(config: TrainConfig) -> None:
    """Build reducer and schedule once, and refuse parts that do not go together.

    Raises:
        UserError: a part that does not exist, a value out of range, or parts that do not go together.
    """
    reducer = build_reducer(config)
    with as_user_error(TypeError):
        scoped(reducer, config.scope)
        if config.rounds.every:
            check_method(reducer)
        if config.rounds.lost_workers == "go_on":
            check_losable(reducer)
        schedule = build_schedule(config)
    _check_momenta(config, innermost(reducer))
    if schedule:
        _check_schedule(config, schedule, reducer)


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


def build_reducer(config: TrainConfig) -> micro.Reducer:
    """Return the reducer that the configuration describes.

    Raises:
        UserError: a part that does not exist, a value out of range, or parts that do not go together.
    """
    parts = config.sparsifier
    common: dict[str, Any] = {"nonfinite": config.nonfinite, "seed": config.seed}
    with as_user_error(TypeError, OverflowError):
        common["density"] = _density(config)
        if part_name(parts.reducer) not in ("sparse", *WRAPPING):
            whole = micro.build(micro.Reducer, parts.reducer, **common)
            _refuse_parts(config)
            return whole
        if parts.selector is None:
            raise UserError("sparsifier.selector is missing: say which indices to send, or choose sparsifier=dense")
        sparse = micro.SparseReducer(
            selector=micro.build(micro.Selector, parts.selector),
            exchange=micro.build(micro.Exchange, parts.exchange),
            codec=micro.build(micro.Codec, parts.codec),
            indices=micro.build(micro.IndexCodec, parts.indices),
            feedback=micro.build(micro.Feedback, _feedback(config)),
            **common,
        )
        reducer = _around(sparse, parts.reducer)
    for layer in layers(reducer):
        if isinstance(layer, micro.TwoLevel) and config.world_size % layer.ranks_per_node:
            raise UserError(
                f"ranks_per_node of sparsifier {parts.name} must divide the number of workers, "
                f"got {layer.ranks_per_node} for {config.world_size}"
            )
    return reducer


def _around(sparse: micro.Reducer, spec: Any) -> micro.Reducer:
    """Return ``sparse`` with the reducers of ``spec`` around it; a mapping may name the next one, its ``reducer``."""
    if spec == "sparse":
        return sparse
    if part_name(spec) not in WRAPPING:
        raise UserError(f"reducer of a sparsifier's reducer must be sparse, {' or '.join(WRAPPING)}, got '{spec}'")
    settings = dict(spec) if isinstance(spec, dict) else {"name": spec}
    return micro.build(micro.Reducer, settings, reducer=_around(sparse, settings.pop("reducer", "sparse")))


def _density(config: TrainConfig) -> micro.Density[Any]:
    warmup, policy = config.density_warmup, config.sparsifier.policy
    if policy is None:
        if not warmup.steps:
            return Constant(config.density)
        return micro.WarmUp(
            density=config.density, start_density=warmup.start, steps=warmup.steps, stages=warmup.stages
        )
    if warmup.steps:
        raise UserError(f"density_warmup.steps is {warmup.steps}, but sparsifier.policy sets the density: leave one")
    return micro.build(micro.Density, policy, density=config.density)


def _feedback(config: TrainConfig) -> Any:
    """Return the feedback: the sparsifier's own, or a local momentum with optimizer.momentum_at=gradient."""
    given, chosen = config.sparsifier.feedback, config.optimizer
    if chosen.momentum_at == "update":
        return given
    decay = given.get("decay", 1.0) if isinstance(given, dict) else 1.0
    if part_name(given) != "residual" or decay != 1.0:
        what = f"'{part_name(given)}'" if decay == 1.0 else f"decay={shown(decay)}"
        raise UserError(
            f"optimizer.momentum_at=gradient replaces feedback residual, got {what}: use momentum_at=update"
        )
    if chosen.nesterov == "published":
        raise UserError("optimizer.nesterov=published works on the averaged gradient: use momentum_at=update")
    return {"name": "momentum", "momentum": chosen.momentum, "nesterov": chosen.nesterov == "pytorch"}


def _refuse_parts(config: TrainConfig) -> None:
    """Refuse parts together with a reducer that has none."""
    parts, name = config.sparsifier, part_name(config.sparsifier.reducer)
    for part in ("selector", "exchange", "codec", "indices", "feedback", "policy"):
        if getattr(parts, part) != getattr(SparsifierConfig, part):
            raise UserError(f"sparsifier.{part} has no effect for {name}, got '{getattr(parts, part)}': leave it out")
    if config.optimizer.momentum_at == "gradient":
        raise UserError(f"optimizer.momentum_at=gradient needs a residual, and {name} has none: use update")


def _check_momenta(config: TrainConfig, method: micro.Reducer) -> None:
    """Refuse two momenta, and outer momentum with a residual."""
    chosen, rounds = config.optimizer, config.rounds
    holds_own = isinstance(method, micro.SparseReducer) and method.feedback.name == "momentum"
    if holds_own and chosen.momentum and chosen.momentum_at == "update":
        remedy = "set optimizer.momentum=0" + (" optimizer.nesterov=none" if chosen.nesterov != "none" else "")
        raise UserError(
            f"sparsifier.feedback momentum holds the momentum, got optimizer.momentum={chosen.momentum:g} too: {remedy}"
        )
    if not rounds.every or not rounds.momentum or rounds.momentum_with_feedback:
        return
    if method.start(micro.Layout(("weights",), ((8, 8),)), torch.float32, torch.device("cpu")).residual.numel():
        raise UserError(
            f"rounds.momentum={rounds.momentum:g} and the residual of {config.sparsifier.name} both add up what was "
            "not applied at once: set rounds.momentum=0, or rounds.momentum_with_feedback=true"
        )


def _check_schedule(config: TrainConfig, schedule: Schedule, reducer: micro.Reducer) -> None:
    if config.cluster.simulated:
        raise UserError(f"schedule={config.schedule.name} needs real workers, simulated ones have one bucket: use auto")
    if schedule.is_planned and any(isinstance(layer, micro.TwoLevel) for layer in layers(reducer)):
        raise UserError(
            f"schedule {schedule.name} plans from a link that was measured in one level, two_level has two: choose "
            "schedule=layerwise, single or ddp"
        )
    for name in ("trace", "link") if schedule.is_planned else ("trace", "link", "select"):
        if (getattr(config.schedule, name) is None) == schedule.is_planned:
            wrong = "is missing: measure it with experiments.profile" if schedule.is_planned else "means nothing here"
            raise UserError(f"schedule.{name} {wrong} (schedule {schedule.name})")
