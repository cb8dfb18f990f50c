"""A mean that is written before the host of an accelerator knows whether it counts: one read in the end tells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micro.feedback import Undo, nothing_to_undo
from micro.flat import Layout
from micro.health import Finite, FirstBad, index_of, is_number, read
from micro.kernels.reference import first_nonfinite
from micro.nonfinite import Finding


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a mean.

    Attributes:
        is_finite: whether all gradients were finite, the same on all ranks.
        bad_update: index of the first element of the update that is not finite, where gradients were.
        num_updated: distinct entries in the mean.
        records: numbers for the record of the step, None where there is none.
        undo: puts back what was sent, where the mean counts.
    """

    is_finite: bool
    bad_update: int | None
    num_updated: int
    records: list[Any]
    undo: Undo

    def findings(self, layout: Layout, first_bad: FirstBad) -> tuple[Finding, ...]:
        """Return what was not finite; ``first_bad`` is where this rank's first bad sum is."""
        if self.is_finite and self.bad_update is None:
            return ()
        return (Finding(layout, index_of(first_bad, layout.numel), self.bad_update),)


def applied(
    grad: Tensor,
    undo: Undo,
    *records: Tensor | None,
    is_finite: Finite,
    num_updated: int | Tensor,
    cut_: Callable[[], object],
) -> Applied:
    """Return what became of the mean in ``grad`` (numel,); of a bad step what was sent is put back.

    An accelerator is read once.

    Args:
        undo: puts back what was sent.
        records: numbers () for the record of the step.
        is_finite: whether all ranks' gradients were finite; where the host knows that they were not, there is no mean.
        num_updated: see Applied.
        cut_: makes the accumulator small enough for the next step, where the mean of finite gradients overflowed.
    """
    fits = is_finite is False or is_number(grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32)))
    were_finite, is_sum_finite, number, numbers = read(is_finite, fits, num_updated, *records)
    bad_update = None if is_sum_finite or not were_finite else first_nonfinite(grad)
    if were_finite and bad_update is None:
        return Applied(True, None, number, numbers, undo)
    undo()
    if bad_update is not None:
        cut_()
    return Applied(were_finite, bad_update, number, numbers, nothing_to_undo)
