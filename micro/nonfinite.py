"""NaN and Inf in a gradient: found before they reach a residual, and handled by all ranks together."""

from typing import Literal, get_args

import torch

from micro.comm import Comm
from micro.flat import Layout

Policy = Literal["stop", "skip"]
"""What to do about NaN or Inf in a gradient: raise on all ranks, or make that step's update zero."""


class NonFiniteGradient(RuntimeError):
    """A gradient held NaN or Inf. Raised on all ranks in the same step; no residual was touched by it."""


def check_policy(policy: str) -> None:
    """Raise ValueError unless ``policy`` is 'stop' or 'skip'."""
    if policy not in get_args(Policy):
        raise ValueError(f"nonfinite must be one of {', '.join(get_args(Policy))}, got '{policy}'")


def report(bad: int | None, layout: Layout, step: int, comm: Comm, device: torch.device) -> NonFiniteGradient:
    """Return the error that names every bad rank's first bad parameter; all ranks call it together."""
    mine = torch.tensor([-1 if bad is None else bad], dtype=torch.int64, device=device)
    found = comm.gather_rows(mine).view(-1).tolist()  # host sync: the run ends here
    places = [f"'{layout.name_at(index)}' on rank {rank}" for rank, index in enumerate(found) if index >= 0]
    return NonFiniteGradient(
        f"gradient of {', '.join(places)} is not finite at step {step}; nothing of it was kept. "
        "Lower the learning rate, or set nonfinite=skip to leave such steps out"
    )


def mean_not_finite(name: str, step: int) -> NonFiniteGradient:
    """Return the error for a dense mean: it is the same on all ranks and does not show which rank caused it."""
    return NonFiniteGradient(
        f"mean gradient of '{name}' is not finite at step {step}. "
        "Lower the learning rate, or set nonfinite=skip to leave such steps out"
    )
