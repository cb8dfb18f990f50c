"""Times of the parts of a step, in seconds of the host's clock; NaN where they are not recorded (see Comm.instant)."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Clock:
    """The clock of a reduction, which stands still while others run.

    Attributes:
        ran: what it showed at the time ``since``, from which it goes on.
        device: whose time it showed last.
    """

    ran: float = 0.0
    since: float = 0.0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - it never changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Where the time of a reduction went: choosing, inside collectives (waiting included), and in all else."""

    select: float = 0.0
    exchange: float = 0.0
    rest: float = 0.0
