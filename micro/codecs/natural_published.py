"""Natural compression as published: rounded at random, without bias."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.codecs.base import Key
from micro.codecs.natural import Natural
from micro.randomness import mantissas, words


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedNatural(Natural):
    """Values travel as sign and power of two, rounded at random to one of the two powers around them.

    The mean over draws is the value. The variance is at most 1/8 of the squared norm, so a residual stays bounded with
    it too. Range and bytes are those of `Natural`.

    Source: Horvath et al., Natural Compression for Distributed Deep Learning, arXiv 1905.10988. Differences: the powers
    end at the message's largest, so that none of the seven bits is spent above it.
    """

    name: ClassVar[str] = "natural"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False

    def _dither(self, values: Tensor, key: Key) -> Tensor | int:
        return mantissas(words(*key), values.numel(), values.device)
