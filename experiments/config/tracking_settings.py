"""Settings of tracking, and their check."""

from dataclasses import dataclass, field

from experiments.config.errors import UserError, check_choice, short

NAMES = ("none", "wandb")
MODES = ("offline", "online")
_NOT_IN_NAMES = "/\\#?%:"  # what W&B refuses in the name of a project


@dataclass(kw_only=True)
class TrackingConfig:
    """Whether a run is mirrored at Weights & Biases, and where.

    Attributes:
        name: none or wandb.
        mode: offline: files in the run's folder, for ``wandb sync``; online: the server as well.
        project, entity, tags: of Weights & Biases; without an entity it is the user's own.
        finish_s: seconds that a finished run waits at most for its mirror.
    """

    name: str = "none"
    mode: str | None = None
    project: str | None = None
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    finish_s: float = 60.0


def check_tracking(tracking: TrackingConfig) -> None:
    """Raise UserError for a setting that is missing, out of its range, or has no effect."""
    check_choice("tracking", NAMES, tracking.name)
    if tracking.name == "none":
        given = next((key for key in ("mode", "project", "entity", "tags") if getattr(tracking, key)), None)
        if given:
            raise UserError(f"tracking.{given} is given, but nothing is tracked: add tracking=wandb, or leave it out")
        return
    check_choice("tracking.mode", MODES, tracking.mode or "")
    if not tracking.project:
        raise UserError("tracking.project is missing: name a project of W&B")
    for key in ("project", "entity"):
        _check_name(f"tracking.{key}", getattr(tracking, key))
    for tag in tracking.tags:
        if not 1 <= len(tag) <= 64:
            raise UserError(f"tracking.tags must be words of 1 to 64 characters, got {short(tag)!r}")
    if not tracking.finish_s >= 0:
        raise UserError(f"tracking.finish_s must be at least 0, got {tracking.finish_s}")


def _check_name(key: str, name: str | None) -> None:
    if name is None:
        return
    if not 1 <= len(name.strip()) <= 128 or not name.isprintable() or set(_NOT_IN_NAMES) & set(name):
        raise UserError(f"{key} must be a name without any of {_NOT_IN_NAMES}, got {short(name)!r}")
