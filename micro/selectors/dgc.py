"""DGC: every rank guesses its k-th largest magnitude from a sample."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.parts import Rule, check_rule
from micro.selectors.base import Selector
from micro.selectors.fitting import Correction, select_near
from micro.selectors.sampling import odd_stride, own_randomness, strided_magnitudes
from micro.sparse import Selection, Step

SHARE = 0.01  # of the vector is sampled, as in the public code
HITS = 32  # samples expected above the threshold: the guess is good to 1 / sqrt(HITS) in the count
FEWEST_HITS, UPPER, LOWER, ROUNDS = 2, 1.3, 0.8, 10  # the public code's sample and adaptation


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC(Selector[Correction]):
    """Select by a threshold that a sample of the rank's own accumulator gives.

    A strided sample with a random phase tells about where the k-th magnitude lies; one scan finds what is above. Ranks
    choose by themselves, so the union grows with their number. The method's other half is `MomentumCorrection`.

    Args:
        rule: 'repaired', at most one scan, cut to the k largest where more than 4/3 k pass, and a guess that earlier
            steps correct (`select_near`); 'published', the public code's adaptation step for step.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3, and its public code.
    Differences from both: the bucket is searched as one vector (theirs: tensor by tensor, those of one dimension sent
    dense); k is rounded down (the code: up). 'repaired': the sample is large enough for 32 hits where the code takes 2,
    between k / 2 and 4/3 k are sent as they are (the code scans up to 10 times more, and of those between k and 1.3 k
    sends the k lowest indices), zeros are never sent.

    Raises:
        ValueError: no such rule.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "dgc"

    def __post_init__(self) -> None:
        check_rule(self)

    def start(self) -> Correction:
        """Return the state before the first step; the published rule has none and leaves it as it is."""
        return Correction()

    def select(self, state: Correction, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return what passes the sampled threshold."""
        randomness, k = own_randomness(step, comm), min(step.target_count, acc.numel())
        if self.rule == "published":
            return _published(acc, k, randomness)
        return select_near(state, acc, _sampled_threshold(acc, k, randomness), k)


def _sampled_threshold(acc: Tensor, k: int, randomness: torch.Generator) -> float:
    numel = acc.numel()
    wanted = max(math.ceil(SHARE * numel), math.ceil(HITS * numel / k))
    sample = strided_magnitudes(acc, odd_stride(numel, wanted), randomness)
    return _smallest_of_top(sample, math.ceil(sample.numel() * k / numel))


def _smallest_of_top(sample: Tensor, count: int) -> float:
    top = torch.topk(sample, min(count, sample.numel()), sorted=False).values
    return float(top.min())  # host sync: the scan's threshold


def _published(acc: Tensor, k: int, randomness: torch.Generator) -> Selection:
    """Adapt the sampled threshold in up to 10 rounds, cut a large excess exactly, then keep the lowest k indices."""
    numel = acc.numel()
    stride = _published_stride(numel, k)
    sample = strided_magnitudes(acc, stride, randomness)
    threshold = _smallest_of_top(sample, math.ceil(numel // stride * k / numel))
    indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
    for _ in range(ROUNDS if stride > 1 else 0):
        if indices.numel() > UPPER * k:
            indices = indices.index_select(0, kernels.largest(magnitudes, k))
            break
        if indices.numel() >= LOWER * k:
            break
        threshold *= LOWER
        indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
    return Selection(indices[:k], threshold=threshold)


def _published_stride(numel: int, k: int) -> int:
    """Return a multiple of 32, plus 1, lowered by 8 until the sample is large enough."""
    fewest = math.ceil(FEWEST_HITS * numel / k)
    if numel <= fewest:
        return 1
    fewest = max(math.ceil(SHARE * numel), fewest)
    stride = math.ceil(numel / fewest / 32) * 32 + 1
    while numel // stride < fewest:
        stride -= 8
    return stride
