"""A selector of another package: it uses what micro makes public, and nothing else."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.extend import Comm, NoState, Overlap, Reduction, Selection, Selector, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest(Selector[NoState]):
    """Select the smallest magnitudes.

    Args:
        skip: how many of the very smallest to leave out.
    """

    skip: int = 0
    name: ClassVar[str] = "smallest"
    overlap: ClassVar[Overlap] = Overlap.ANY

    def __post_init__(self) -> None:
        if self.skip < 0:
            raise ValueError(f"skip of smallest must be at least 0, got {self.skip}")

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return this rank's k smallest magnitudes."""
        yield from ()
        order = acc.abs().argsort(stable=True)[self.skip : self.skip + step.target_count]
        return Selection(torch.sort(order).values.to(torch.int32))
