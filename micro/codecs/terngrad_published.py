"""TernGrad as published: without bias."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.codecs.terngrad import TernGrad


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTernGrad(TernGrad):
    """Values travel as -1, 0 or 1 and count for the block's largest magnitude: the mean over draws is the (cut) value.

    The variance is larger than the squared norm: for use with feedback=none. A residual under it grows, to ten times
    the gradient's norm with the exchange gather, and to hundreds of times with union, which rounds twice.

    Args:
        clip, block: see `TernGrad`.

    Source: Wen et al., TernGrad, NeurIPS 2017, arXiv 1705.07878. Differences: those of `TernGrad`, but for what a code
    counts for.
    """

    name: ClassVar[str] = "terngrad"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False
    diverges_with_feedback: ClassVar[bool] = True

    def _worth(self, shares: Tensor, codes: Tensor, limits: Tensor) -> Tensor:
        return limits
