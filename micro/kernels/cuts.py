"""A selection among slices that is cut by counts of magnitudes, in plain torch.

Candidates are counted in bins: bin b begins at the magnitude whose float32 has the bits ``lowest + (b << shift)``, and
the last bin has no end.
"""

import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from micro.kernels.bit_patterns import magnitude_of
from micro.kernels.table import forms

NUM_BINS = 32  # counts that each rank sends: 128 bytes


class Cut(NamedTuple):
    """The bin in which the k-th magnitude lies, and what is kept of it; equal on all ranks.

    Attributes:
        bin: its number; all above it is kept.
        fraction: the part of it that is kept.
        shares: how many of it each rank keeps.
        taken: how many each rank keeps in all.
        num_candidates: of all ranks.
    """

    bin: int
    fraction: float
    shares: tuple[int, ...]
    taken: tuple[int, ...]
    num_candidates: int


def reaching(lowest: int, dtype: torch.dtype) -> float:
    """Return the smallest number of ``dtype`` that as a float32 is the magnitude with the bits ``lowest`` or more.

    Histograms and bins count float32. In double precision some numbers just below that magnitude are rounded to it.
    """
    magnitude = magnitude_of(lowest)
    if dtype != torch.float64:
        return magnitude
    middle = (magnitude_of(lowest - 1) + magnitude) / 2
    return math.nextafter(middle, math.inf) if lowest % 2 else middle  # ties are rounded to even bits


def collect(
    x: Tensor, start: int, lowest: int, shift: int, found: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, magnitudes and counts by bin of what reaches ``lowest``, ``found`` or not; see micro.kernels."""
    places, magnitudes = found or forms(x).above(x, reaching(lowest, x.dtype))
    magnitudes = magnitudes.to(torch.float32)
    return places + start, magnitudes, _counts(_bins(magnitudes, lowest, shift))


def cut(counts: Tensor, k: int) -> Cut:
    """Return where the k-th magnitude of all lies, and how much each rank keeps so that k are kept, or all there are.

    Ranks keep of that bin in proportion to what they have in it, by largest remainder, low ranks first among equals.

    Args:
        counts: (world_size, NUM_BINS) int32, in the host's memory.
    """
    totals = counts.sum(0).tolist()
    above, last = 0, NUM_BINS - 1
    while last > 0 and above + totals[last] < k:
        above += totals[last]
        last -= 1
    inside = totals[last]
    missing = min(k - above, inside)
    shares = _apportion(missing, counts[:, last].tolist(), inside)
    taken = tuple(map(operator.add, counts[:, last + 1 :].sum(1).tolist(), shares))
    return Cut(last, missing / inside if inside else 1.0, tuple(shares), taken, sum(totals))


def _apportion(missing: int, counts: list[int], total: int) -> list[int]:
    """Split ``missing`` over ranks in proportion to ``counts`` (world_size,), whose sum is ``total``."""
    if missing == total:
        return counts
    shares, rests = zip(*(divmod(count * missing, total) for count in counts), strict=True)
    order = sorted(range(len(counts)), key=lambda rank: -rests[rank])
    rounded_up = set(order[: missing - sum(shares)])
    return [share + (rank in rounded_up) for rank, share in enumerate(shares)]


def keep(indices: Tensor, magnitudes: Tensor, count: int, bottom: int, top: int, share: int) -> Tensor:
    """Return the indices of what is kept; see micro.kernels."""
    if magnitudes.device.type != "cpu":  # the same ones, as many as are known: the host reads nothing
        return indices.index_select(0, torch.argsort(magnitudes, descending=True, stable=True)[:count].sort().values)
    bits = magnitudes.view(torch.int32)
    if not share:
        return indices.index_select(0, torch.nonzero(bits >= top).view(-1))
    inside = bits[(bits >= bottom) & (bits < top)]
    smallest = torch.kthvalue(inside, inside.numel() - share + 1).values
    kept = torch.nonzero(bits >= smallest).view(-1)
    surplus = kept.numel() - count
    if surplus:
        ties = torch.nonzero(bits.index_select(0, kept) == smallest).view(-1)
        is_kept = torch.ones_like(kept, dtype=torch.bool)
        is_kept[ties[-surplus:]] = False
        kept = kept[is_kept]
    return indices.index_select(0, kept)


def _bins(magnitudes: Tensor, lowest: int, shift: int) -> Tensor:
    return ((magnitudes.view(torch.int32) - lowest) >> shift).clamp_(0, NUM_BINS - 1)


def _counts(bins: Tensor) -> Tensor:
    """Return (NUM_BINS,) int32 counts of ``bins`` (m,); of an accelerator `torch.bincount` would read the largest."""
    if bins.device.type == "cpu":
        return torch.bincount(bins, minlength=NUM_BINS).to(torch.int32)
    counts = torch.zeros(NUM_BINS, dtype=torch.int32, device=bins.device)
    return counts.scatter_add_(0, bins.long(), torch.ones_like(bins))
