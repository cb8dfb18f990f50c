"""Settings that contradict each other: each row of ``NEEDS`` is a setting that has an effect under a condition alone.

Without it the setting must be at its default: a value that is ignored would never be noticed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiments.config.errors import UserError, shown
from experiments.config.schema import RoundsConfig, TrainConfig, defaults_of_schema, flat


@dataclass(frozen=True, slots=True)
class Need:
    """A setting that needs others.

    Attributes:
        key: dotted.
        is_met: whether it may have another value than its default.
        why: what is said after ``KEY=VALUE``, where it may not.
        usual: its default, if not the schema's.
    """

    key: str
    is_met: Callable[[TrainConfig], Any]
    why: str
    usual: Any = None


def _only_without_rounds(key: str, why: str, usual: Any = None) -> Need:
    return Need(key, lambda c: not c.rounds.every, f"does not go with rounds.every, {why}", usual)


def _only_where_all_stay(key: str, why: str) -> Need:
    return Need(key, lambda c: c.rounds.lost_workers == "stop", f"does not go with rounds.lost_workers=go_on, {why}")


_NEVER_EQUAL = "weights are at no time equal on all ranks"
NEEDS = (
    Need("lr_end", lambda c: c.lr_shape != "steps", "is for lr_shape=linear and cosine"),
    Need("lr_milestones", lambda c: c.lr_shape == "steps", "is for lr_shape=steps"),
    Need("resize", lambda c: c.start_from is not None, "needs start_from"),
    Need("cluster.max_restarts", lambda c: not c.cluster.simulated, "is for real workers, simulated ones never fail"),
    Need("cluster.timeout_s", lambda c: not c.cluster.simulated, "is for real workers, simulated ones wait for none"),
    *(
        Need(f"optimizer.{key}", lambda c: c.optimizer.name == "sgd", "is for sgd")
        for key in ("momentum", "nesterov", "momentum_at", "lr_at")
    ),
    Need("optimizer.betas", lambda c: c.optimizer.name in ("adam", "adamw"), "is for adam and adamw"),
    Need(
        "optimizer.nesterov",
        lambda c: c.optimizer.momentum or c.optimizer.nesterov == "published",
        "needs a momentum above 0",
    ),
    Need("optimizer.momentum_at", lambda c: c.optimizer.momentum, "needs a momentum above 0"),
    Need("optimizer.clip_at", lambda c: c.optimizer.clip is not None, "needs optimizer.clip"),
    Need(
        "optimizer.clip_norm",
        lambda c: c.optimizer.clip is not None and c.optimizer.clip_at == "gradient",
        "needs optimizer.clip and optimizer.clip_at=gradient",
    ),
    *(
        Need(
            f"tracking.{key}",
            lambda c: c.tracking.name != "none",
            "needs tracking=wandb",
        )
        for key in ("mode", "project", "entity", "tags")
    ),
    *(
        Need(f"rounds.{key}", lambda c: c.rounds.every, "needs rounds.every")
        for key in vars(RoundsConfig())
        if key != "every"
    ),
    Need("rounds.nesterov", lambda c: c.rounds.momentum, "needs a momentum above 0"),
    _only_without_rounds("resize", "workers have weights of their own"),
    _only_without_rounds("optimizer.lr_at", "differences of weights have the learning rate in them"),
    _only_without_rounds("optimizer.momentum_at", "each worker's own optimizer has the momentum"),
    _only_without_rounds("optimizer.clip_at", "each worker clips its own gradients"),
    _only_without_rounds("optimizer.clip_norm", "workers know nothing of each other's gradients"),
    _only_without_rounds("schedule.name", "one vector is exchanged at the end of a round", "auto"),
    Need("rounds.lost_workers", lambda c: not c.cluster.simulated, "is for real workers, no simulated one is lost"),
    *(_only_where_all_stay(f"rounds.{key}", _NEVER_EQUAL) for key in ("fragments", "delay", "mix")),
    _only_where_all_stay("checkpoint.every_steps", "which saves at the end of every round"),
)


def check_combinations(config: TrainConfig) -> None:
    """Raise UserError for the first setting that has no effect beside the others, or lacks one that it needs."""
    for need in NEEDS:
        *groups, name = need.key.split(".")
        given = getattr(getattr(config, groups[0]) if groups else config, name)
        usual = _DEFAULTS[need.key] if need.usual is None else need.usual
        if given != usual and not need.is_met(config):
            value = given if isinstance(given, str) else shown(given)
            raise UserError(f"{need.key.removesuffix('.name')}={value} {need.why}: change that, or leave it out")
    tracking = config.tracking
    for key in ("mode", "project"):
        if tracking.name != "none" and not getattr(tracking, key):
            raise UserError(f"tracking.{key} is missing: W&B needs one")


_DEFAULTS = flat(defaults_of_schema())
