"""Seconds of selection by a formula, for where none were measured."""

import math
from dataclasses import dataclass

from experiments.config.errors import UserError

SORTED, SLICED = ("topk", "leader"), ("micro", "exdyna")  # a leader sorts while all others wait for it
SCANNED = ("reused", "threshold", "gaussiank", "dgc", "redsync", "sidco", "sage")
SORT_S = 2.18896957e-10  # s of s x log2(x) for the top-k of a P102-100, literal in the public code of OMGS-SGD
MATRICES = "powersgd"
MATRIX_BYTES = (
    48  # kept (12) and cleared (4), copied to matrices (8), two products read it (8), one takes from it (8), one
)
# writes the update (4), which is looked through (4); thin factors, and arithmetic with four columns, are left out
SHARE_BYTES = 20  # copied into shards (8), the parts received added up (4), the updates put in place (8)
SCAN_BYTES, KEEP_BYTES = 4, 16  # read once to compare; residual + gradient, kept (12), and the gradient cleared (4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionFormula:
    """Seconds of selection: memory traffic, and for an exact top-k the known s x log2(x).

    Every method adds the residual and clears the gradient, 16 bytes an element; one with a threshold reads all of it
    once more, 4 bytes, one with exclusive slices reads a share of 1 in ``world_size``. PowerSGD's products of matrices
    with a few columns pass through memory too. Starting a kernel costs nothing.

    Attributes:
        selectors: the name of each method's selector.
        bytes_per_s: of memory, assumed.
    """

    selectors: dict[str, str]
    world_size: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        for method, selector in self.selectors.items():
            if selector not in (*SORTED, *SLICED, *SCANNED, MATRICES):
                known = ", ".join((*SORTED, *SLICED, *SCANNED, MATRICES))
                raise UserError(
                    f"no formula for the selection of {method} ({selector}), only for {known}: measure it with "
                    "'python -m experiments.profile select' and give --select FILE"
                )

    def seconds(self, method: str, numel: float) -> float:
        """Return the seconds that a method takes for ``numel`` elements."""
        if self.selectors[method] == MATRICES:
            return MATRIX_BYTES * numel / self.bytes_per_s
        kept_s = KEEP_BYTES * numel / self.bytes_per_s
        if self.selectors[method] in SORTED:
            return kept_s + SORT_S * numel * math.log2(max(numel, 2))
        share = self.world_size if self.selectors[method] in SLICED else 1
        return kept_s + SCAN_BYTES * numel / share / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelFormula:
    """Seconds of selection in two levels: from a shard, and 20 bytes an element to take shards apart and together.

    Attributes:
        of_shard: of the methods among as many ranks as there are nodes; a method that it does not know selects nothing.
        ranks_per_node: number of shards.
    """

    of_shard: SelectionFormula
    ranks_per_node: int

    def seconds(self, method: str, numel: float) -> float:
        """Return the seconds that a method takes for ``numel`` elements."""
        shared_s = SHARE_BYTES * numel / self.of_shard.bytes_per_s
        if method not in self.of_shard.selectors:
            return shared_s
        return shared_s + self.of_shard.seconds(method, numel / self.ranks_per_node)
