"""Top-k: every rank chooses its own k largest magnitudes."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.selectors.base import NoState, Selector
from micro.sparse import Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Selector[NoState]):
    """Select the k largest magnitudes of this rank's accumulator, over the whole vector.

    Ranks choose by themselves, so the union grows with their number (build-up): between k and world_size * k indices.
    Exactly min(k, numel) are chosen, zeros included where fewer are non-zero; ties go to the lowest index.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3 (without its other parts);
    Shi et al., arXiv 1911.08772, for the theory. Differences: exact selection by a sampled guess and one scan instead
    of a sort.
    """

    name: ClassVar[str] = "topk"

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return this rank's k largest."""
        indices = kernels.largest(acc, step.target_count)
        return Selection(indices, counts=(indices.numel(),) * comm.world_size)
