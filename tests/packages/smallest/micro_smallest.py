"""A selector of another package: it uses what micro makes public, and nothing else."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import micro


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest(micro.Selector[micro.NoState]):
    """Select the smallest magnitudes.

    Args:
        skip: how many of the very smallest to leave out.
    """

    skip: int = 0
    name: ClassVar[str] = "smallest"
    overlap: ClassVar[micro.Overlap] = micro.Overlap.ANY

    def __post_init__(self) -> None:
        if self.skip < 0:
            raise ValueError(f"skip of smallest must be at least 0, got {self.skip}")

    def select(
        self, state: micro.NoState, acc: Tensor, step: micro.Step, comm: micro.Comm
    ) -> micro.Reduction[micro.Selection]:
        """Return this rank's k smallest magnitudes."""
        yield from ()
        order = acc.abs().argsort(stable=True)[self.skip : self.skip + step.target_count]
        return micro.Selection(torch.sort(order).values.to(torch.int32))
