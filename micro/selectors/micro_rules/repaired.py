"""provisional"""
import math
from dataclasses import dataclass

import torch

from micro import kernels
from micro.selectors.histogram import SHIFT, magnitude_bins
from micro.selectors.micro_rules.agreed import _magnitude
from micro.selectors.micro_rules.base import Found, Rule, Search


@dataclass(slots=True)
class RepairedState:
    threshold: float | None = None


class Repaired(Rule[RepairedState]):
    def start(self):
        return RepairedState()

    def search(self, state, search):
        k = search.step.target_count
        if state.threshold is None:
            totals = search.comm.all_reduce_(magnitude_bins(search.slice), "counts")
            reaching = torch.nonzero(totals.flip(0).cumsum(0) >= k).view(-1)
            b = totals.numel() - 1 - int(reaching[0]) if reaching.numel() else 0
            state.threshold = _magnitude(max(b << SHIFT, 1))
        indices = kernels.above(search.slice, state.threshold)
        tail = (search.slice.index_select(0, indices).abs().double() / state.threshold).log().sum()
        row = torch.stack([torch.tensor(float(indices.numel()), dtype=torch.float64), tail])
        rows = search.comm.gather_rows(row).tolist()
        counts = tuple(int(r[0]) for r in rows)
        total = sum(counts)
        used = state.threshold
        if not k / 2 <= total <= 2 * k:
            state.threshold = None
        else:
            state.threshold *= math.exp(sum(r[1] for r in rows) / total * (total / k - 1))
        return Found(indices, counts, used)
