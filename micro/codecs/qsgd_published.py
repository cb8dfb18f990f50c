"""QSGD as published: levels of each bucket's norm, without bias."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.codecs import blocks
from micro.codecs.qsgd import QSGD


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedQSGD(QSGD):
    """Values travel as levels of the bucket's Euclidean norm, rounded at random; the mean over draws is the value.

    The variance is up to min(bucket / s**2, sqrt(bucket) / s) times the squared norm, 3.2 with the defaults: for use
    with feedback=none. A residual under it grows without bound: with the defaults, by orders of magnitude in 100 steps.

    Args:
        bits, block: see `QSGD`.

    Source: Alistarh et al., QSGD, NeurIPS 2017, arXiv 1610.02132. Differences: codes of fixed length instead of Elias
    codes, so that their length need not travel.
    """

    name: ClassVar[str] = "qsgd"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False
    diverges_with_feedback: ClassVar[bool] = True

    def _scales(self, shares: Tensor) -> Tensor:
        return blocks.of_blocks(_norm, self.block, shares)

    def _worth(self, shares: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
        return scales / self.num_levels


def _norm(rows: Tensor) -> Tensor:
    return blocks.roots(blocks.sums(rows * rows))
