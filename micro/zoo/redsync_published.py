"""RedSync as public code compares it: three rounds of bisection between the mean and the largest magnitude."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.norms import norm
from micro.parts import NoState, Rule
from micro.selectors.estimated import Fit
from micro.sparse import Selection, Step

RESOLUTION = 0.2  # the code stops where the bracket of q is no wider: after 3 rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRedSync(Fit[NoState]):
    """A threshold that three rounds of bisection find, in the form in which public code compares the method.

    The threshold is mean + q (largest - mean). q is bisected in 3 rounds, and what the last one found is sent, however
    many; a count between k / 2 and k raises the threshold.

    Source: Fang et al., RedSync, arXiv 1808.04357, as a baseline in the public code of Shi et al., arXiv 1911.08772.
    Differences from the paper: no quantisation of values of one sign; no switch by tensor size; momentum correction is
    a feedback of its own.
    """

    name: ClassVar[str] = "redsync_published"
    rule: ClassVar[Rule] = "published"

    def select(self, state: NoState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return what passes the threshold of the last round."""
        mean = float(norm(acc, 1)) / acc.numel()  # host sync: the thresholds
        largest = float(torch.linalg.vector_norm(acc, math.inf))  # host sync: the thresholds
        low, high = 0.0, 1.0
        while high - low > RESOLUTION:
            middle = low + (high - low) / 2
            threshold = mean + middle * (largest - mean)
            indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
            count = int((magnitudes > threshold).sum())  # host sync: the next round's threshold
            if k < count < 2 * k:
                break
            low, high = (low, middle) if count < k / 2 else (middle, high)
        return Selection(indices[magnitudes > threshold], threshold=threshold)
