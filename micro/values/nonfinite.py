"""The error of a step with NaN or Inf, which names where they are, on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from micro.comm.requests import AllGather, Reduction
from micro.values.flat import Layout

REMEDY = (
    "If the loss is scaled, give attach its scaler=; otherwise lower the learning rate, or set nonfinite=skip to leave "
    "such steps out"
)

MOST_SKIPPED = 100  # steps in a row; a GradScaler comes from 2^16 to a scale below 1 in 17

MOST_NAMED = 3  # places in a message


class NonFiniteGradient(RuntimeError):
    """A gradient or an update held NaN or Inf. Raised on all ranks in the same step; no residual was touched by it."""


def error_of_skipping(num_skipped: int, step: int) -> NonFiniteGradient | None:
    """Return the error where the policy has left out so many steps, one after the other, that nothing is trained."""
    if num_skipped < MOST_SKIPPED:
        return None
    return NonFiniteGradient(
        f"nothing was trained in {num_skipped} steps in a row up to step {step}: no gradient was finite, and "
        "nonfinite=skip leaves such steps out. If the loss is scaled, give attach its scaler=; otherwise load "
        "weights that are finite, or lower the learning rate"
    )


def error_at(places: Sequence[str], step: int) -> NonFiniteGradient:
    """Return the error that names these places, such as "'conv.weight' on rank 1", or the first of them."""
    more = [f"{len(places) - MOST_NAMED} more"] if len(places) > MOST_NAMED else []
    return NonFiniteGradient(
        f"gradient of {', '.join([*places[:MOST_NAMED], *more])} is not finite at step {step} (NaN, Inf or too large "
        f"to be summed over ranks); nothing of it was kept. {REMEDY}"
    )


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
    return error_at(places, step)
