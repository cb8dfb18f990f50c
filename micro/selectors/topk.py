"""Top-k: every rank chooses its own k largest magnitudes."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.density.base import target_count
from micro.requests import Reduction
from micro.selectors.base import NoState, Selector
from micro.selectors.pieces import largest_of_each, pieces_of
from micro.sparse import Selection, Step

TopKScope = Literal["model", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Selector[NoState]):
    """Select the k largest magnitudes of this rank's accumulator, over the whole vector or in each layer.

    Each rank selects on its own, so the union grows with the number of ranks (build-up): between k and world_size * k
    indices. Exactly min(k, numel) are chosen, zeros included where fewer are non-zero; ties go to the lowest index.

    Args:
        scope: 'model' ranks all elements together; 'layer' takes the same share of each parameter, at least one
            element of each, so that a little more than k come out where many parameters are small. Within a bucket of
            DDP, 'model' means the bucket.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3 (without its other parts);
    Shi et al., arXiv 1911.08772, for the theory. Differences: exact selection by a sampled guess and one scan instead
    of a sort.

    Raises:
        ValueError: no such scope.
    """

    scope: TopKScope = "model"
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        if self.scope not in get_args(TopKScope):
            raise ValueError(f"scope of topk must be one of {', '.join(get_args(TopKScope))}, got '{self.scope}'")

    @property
    def by_layer(self) -> bool:  # type: ignore[override]  # depends on the scope
        """Whether each parameter gets the density that the policy sets for it."""
        return self.scope == "layer"

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return this rank's k largest."""
        yield from ()
        indices = kernels.largest(acc, step.target_count) if self.scope == "model" else _of_each_layer(acc, step)
        return Selection(indices, counts=(indices.numel(),) * comm.world_size)


def _of_each_layer(acc: Tensor, step: Step) -> Tensor:
    numels = step.layout.numels
    densities = step.layer_densities or (step.target_count / acc.numel(),) * len(numels)
    counts = list(map(target_count, densities, numels))
    return largest_of_each(acc, pieces_of(numels, str(acc.device)), counts)
