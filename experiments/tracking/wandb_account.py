"""Check the requirements of W&B on this machine: its package, and an API key."""

import os
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO

from experiments.config.errors import UserError, as_user_error, check_choice
from experiments.config.schema import TrackingConfig

_MODES = ("online", "offline", "disabled", "dryrun", "shared")  # values of wandb's own setting


def check_wandb(tracking: TrackingConfig) -> None:
    """Check that the configured mirror works on this machine. Raises: UserError."""
    if tracking.name != "none":
        require_wandb("tracking=wandb")
        if tracking.mode == "online":
            require_key("tracking.mode=online", "use tracking.mode=offline")


def require_wandb(needed_by: str) -> None:
    """Check that wandb is installed and supports WANDB_MODE. Raises: UserError, naming ``needed_by``."""
    if find_spec("wandb") is None:
        raise UserError(f"{needed_by} needs the package wandb, which is not installed: pip install wandb")
    if given := os.environ.get("WANDB_MODE", ""):
        check_choice("WANDB_MODE", _MODES, given)


def require_key(needed_by: str, otherwise: str) -> None:
    """Check without a prompt that wandb finds an API key. Raises: UserError, with ``needed_by`` and the alternative."""
    import wandb

    with as_user_error(Exception, before=f"{needed_by}: "):  # any: a malformed key, invalid settings
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            if wandb.login(prompt=False):
                return
        raise ValueError(f"W&B found no key: set WANDB_API_KEY, or {otherwise}")
