"""How far a rank has moved in a round, and how far all of them have together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from micro.comm import Comm
from micro.local.flat_weights import FlatWeights
from micro.requests import AllGather


@dataclass(frozen=True, slots=True)
class Movement:
    """Norms of this rank's difference of weights and of the update, the cosine between them, and the ranks' drift."""

    own: float
    mean: float
    cosine: float
    drift: float

    @classmethod
    @torch.no_grad()
    def of(cls, weights: Sequence[FlatWeights], own: Sequence[Tensor | None], comm: Comm) -> "Movement":
        """Compare what each rank has moved with the updates that the vectors hold now; all ranks call this.

        When it returns no rank reads the global weights any more, which simulated ranks share.

        Args:
            own: each vector's difference of weights; None where the parameters are as they were when it was measured.
        """
        products = torch.stack([_products(vector, moved) for vector, moved in zip(weights, own, strict=True)]).sum(0)
        rows = comm.answer(AllGather(mine=products)).tolist()  # host sync: once a round, for the record
        mine, mean, inner = rows[comm.rank]
        apart = sum(max(one - 2 * both + update, 0.0) for one, update, both in rows) / len(rows)
        return cls(
            math.sqrt(mine),
            math.sqrt(mean),
            _share(inner, math.sqrt(mine) * math.sqrt(mean)),
            _share(math.sqrt(apart), math.sqrt(mean)),
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 and math.isfinite(whole) else 0.0


def _products(weights: FlatWeights, moved: Tensor | None) -> Tensor:
    """Return (own own, mean mean, own mean) (3,) float64."""
    sums = torch.zeros(3, dtype=torch.float64, device=weights.start.device)
    for own, mean in weights.pairs(moved):
        sums[0] += torch.dot(own, own).double()
        sums[1] += torch.dot(mean, mean).double()
        sums[2] += torch.dot(own, mean).double()
    return sums
