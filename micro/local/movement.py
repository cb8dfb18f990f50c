"""How far a rank has moved in a round, and how far all of them have together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from micro.local.fragment import Fragment


@dataclass(frozen=True, slots=True)
class Movement:
    """Norms of this rank's difference of weights and of the update, and the cosine between them."""

    own: float
    mean: float
    cosine: float

    @classmethod
    @torch.no_grad()
    def of(cls, fragments: Sequence[Fragment]) -> "Movement":
        """Compare what the fragments have measured with the updates that they hold now; parameters are still own."""
        products = torch.stack([_products(fragment) for fragment in fragments]).sum(0)
        own, mean, inner = products.tolist()  # host sync: once a round, for the record
        norms = math.sqrt(own) * math.sqrt(mean)
        return cls(math.sqrt(own), math.sqrt(mean), inner / norms if norms > 0 and math.isfinite(norms) else 0.0)


def _products(fragment: Fragment) -> Tensor:
    """Return (own own, mean mean, own mean) (3,) float64."""
    sums = torch.zeros(3, dtype=torch.float64, device=fragment.start.device)
    for own, mean in fragment.pairs():
        sums[0] += torch.dot(own, own).double()
        sums[1] += torch.dot(mean, mean).double()
        sums[2] += torch.dot(own, mean).double()
    return sums
