"""Settings that contradict each other: each row of ``NEEDS`` has settings that have an effect under a condition alone.

Without it they must be at their defaults: a value that is ignored would never be noticed.
"""

from collections.abc import Callable
from typing import Any

from experiments.config.errors import UserError, shown
from experiments.config.schema import RoundsConfig, TrainConfig, defaults_of_schema, flat

_OF_ROUNDS = " ".join(f"rounds.{key}" for key in vars(RoundsConfig()) if key != "every")
_NO_ROUNDS = "does not go with rounds.every"
_NONE_LOST = "does not go with rounds.lost_workers=go_on"

# The keys, whether they may have another value than their default, and what is said after KEY=VALUE where they may not.
NEEDS: tuple[tuple[str, Callable[[TrainConfig], Any], str], ...] = (
    ("lr_end", lambda c: c.lr_shape != "steps", "is for lr_shape=linear and cosine"),
    ("lr_milestones", lambda c: c.lr_shape == "steps", "is for lr_shape=steps"),
    ("resize", lambda c: c.start_from is not None, "needs start_from"),
    ("cluster.max_restarts cluster.timeout_s", lambda c: not c.cluster.simulated, "is for real workers"),
    (
        "optimizer.momentum optimizer.nesterov optimizer.momentum_at optimizer.lr_at",
        lambda c: c.optimizer.name == "sgd",
        "is for sgd",
    ),
    ("optimizer.betas", lambda c: c.optimizer.name in ("adam", "adamw"), "is for adam and adamw"),
    (
        "optimizer.nesterov",
        lambda c: c.optimizer.momentum or c.optimizer.nesterov == "published",
        "needs a momentum above 0",
    ),
    ("optimizer.momentum_at", lambda c: c.optimizer.momentum, "needs a momentum above 0"),
    ("optimizer.clip_at optimizer.clip_norm", lambda c: c.optimizer.clip is not None, "needs optimizer.clip"),
    ("optimizer.clip_norm", lambda c: c.optimizer.clip_at == "gradient", "needs optimizer.clip_at=gradient"),
    (
        "tracking.mode tracking.project tracking.entity tracking.tags",
        lambda c: c.tracking.name != "none",
        "needs tracking=wandb",
    ),
    (_OF_ROUNDS, lambda c: c.rounds.every, "needs rounds.every"),
    ("rounds.nesterov", lambda c: c.rounds.momentum, "needs a momentum above 0"),
    ("resize", lambda c: not c.rounds.every, f"{_NO_ROUNDS}, workers have weights of their own"),
    (
        "optimizer.lr_at optimizer.momentum_at optimizer.clip_at optimizer.clip_norm",
        lambda c: not c.rounds.every,
        f"{_NO_ROUNDS}, where each worker has an optimizer and gradients of its own",
    ),
    (
        "schedule.name",
        lambda c: not c.rounds.every,
        f"{_NO_ROUNDS}, one vector is exchanged at the end of a round",
    ),
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


def check_combinations(config: TrainConfig) -> None:
    """Raise UserError for the first setting that has no effect beside the others, or lacks one that it needs."""
    for keys, is_met, why in NEEDS:
        for key in keys.split():
            *groups, name = key.split(".")
            given = getattr(getattr(config, groups[0]) if groups else config, name)
            if given != _DEFAULTS[key] and not is_met(config):
                value = given if isinstance(given, str) else shown(given)
                raise UserError(f"{key.removesuffix('.name')}={value} {why}: change that, or leave it out")
    tracking = config.tracking
    for key in ("mode", "project"):
        if tracking.name != "none" and not getattr(tracking, key):
            raise UserError(f"tracking.{key} is missing: W&B needs one")
