"""NaN and Inf: found before they reach a residual or a model, and handled by all ranks together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from micro.flat import Layout
from micro.requests import AllGather, Reduction

Policy = Literal["stop", "skip"]
"""What to do about NaN or Inf: raise on all ranks, or make that step's update zero."""

REMEDY = "Lower the learning rate, or set nonfinite=skip to leave such steps out"


class NonFiniteGradient(RuntimeError):
    """A gradient or an update held NaN or Inf. Raised on all ranks in the same step; no residual was touched by it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Where the gradients of a vector, or its update, are not finite.

    Attributes:
        layout: of the vector.
        in_gradient: index of the first NaN or Inf of this rank's gradient, None where there is none.
        in_update: index of the first NaN or Inf of the update, the same on all ranks, None where there is none.
    """

    layout: Layout
    in_gradient: int | None
    in_update: int | None = None


def check_policy(policy: str) -> None:
    """Raise ValueError unless ``policy`` is 'stop' or 'skip'."""
    if policy not in get_args(Policy):
        raise ValueError(f"nonfinite must be one of {', '.join(get_args(Policy))}, got '{policy}'")


def report(findings: Sequence[Finding], step: int, device: torch.device) -> Reduction[NonFiniteGradient]:
    """Return the error that names every bad rank's first bad parameter; all ranks call it together.

    Where only the update is bad (gradients so large that their sum overflowed, or a dense mean, which does not show
    which rank caused it) its first bad parameter is named.

    Args:
        findings: at least one, and the same vectors in the same order on all ranks.
    """
    unknown = [finding for finding in findings if finding.in_update is None]
    if not unknown:
        finding = findings[0]
        assert finding.in_update is not None
        name = finding.layout.name_at(finding.in_update)
        return NonFiniteGradient(f"mean gradient of '{name}' is not finite at step {step}. {REMEDY}")
    mine = torch.tensor([-1 if f.in_gradient is None else f.in_gradient for f in unknown], device=device)
    places = []
    gathered = yield AllGather(mine=mine)
    for rank, found in enumerate(gathered.tolist()):  # host sync: the run ends here
        named = [f.layout.name_at(index) for f, index in zip(unknown, found, strict=True) if index >= 0]
        places += [f"'{name}' on rank {rank}" for name in named[:1]]
    return NonFiniteGradient(
        f"gradient of {', '.join(places)} is not finite at step {step}, or reaches, with its residual, "
        f"2^100 (float64: 2^996), from where sums over ranks may overflow; nothing of it was kept. {REMEDY}"
    )
