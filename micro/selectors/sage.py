"""SAGE: every rank's own threshold follows the mean magnitude of a sample."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.requests import Reduction
from micro.selectors.base import Selector
from micro.selectors.fitting import Correction, select_near
from micro.selectors.sampling import odd_stride, own_randomness, strided_magnitudes
from micro.sparse import Selection, Step

SAMPLE_SIZE = 1 << 14  # gives a mean good to a percent, so that the threshold does not jitter with it


@dataclass(slots=True)
class SageState:
    """What a rank has learned about its threshold over the sampled mean."""

    correction: Correction = field(default_factory=Correction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sage(Selector[SageState]):
    """Select by a threshold of the rank's own that moves with the mean magnitude of a sample.

    The source multiplies the threshold from step to step by alpha, the ratio of the sampled means, and by corrections
    beta and gamma for the density found. Alpha is kept: the product of all alphas is the present mean over the first
    one, so the estimate is the mean itself. Beta and gamma are replaced: the factor on the mean follows the log of the
    count over k, up and down in the same way, at the slope that the tail itself shows (`select_near`). Beta lowers the
    threshold by a share of at most density / 2 per step: at a density of 0.001, a threshold that is a tenth too high
    takes 190 steps to come down. Each rank selects on its own, so the union grows with the number of ranks.

    Source: Yoon and Oh, SAGE, The Journal of Supercomputing, 2023, and the public code of MiCRO, HiPC 2023, arXiv
    2310.00967, which holds it. Differences: see above; the sample is strided and larger, and read by one slice (the
    code: a loop over 400 single elements); the start is this step's own k-th magnitude (the code: 1 / (2 sqrt k)); one
    scan both examines and selects; nothing selected on any rank is no error. `PublishedSage` follows the public code.
    """

    name: ClassVar[str] = "sage"
    rule: ClassVar[str] = "repaired"

    def start(self) -> SageState:
        """Return the state before the first step."""
        return SageState()

    def load(self, saved: dict[str, Any]) -> SageState:
        """Return the state that ``save`` described; older versions saved more than is needed."""
        return SageState(Correction(**saved["correction"]))

    def select(self, state: SageState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return what passes this rank's threshold."""
        yield from ()
        k = min(step.target_count, acc.numel())
        sample = strided_magnitudes(acc, odd_stride(acc.numel(), SAMPLE_SIZE), own_randomness(step, comm))
        mean = float(sample.mean(dtype=torch.float64))  # host sync: the threshold follows from it
        return select_near(state.correction, acc, mean, k)
