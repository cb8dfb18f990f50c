"""The kernels in plain torch: the reference of their tests, and the fallback where they cannot run."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from micro.kernels.magnitudes import NUM_BINS, reaching
from micro.values.finite import FirstBad

Lists = Callable[[int], tuple[Tensor, Tensor]]  # what `above` finds, of a known length
MOST_SORTED = 1 << 17  # elements of which an accelerator finds the largest by sorting all: in fewer calls
CHUNK = 1 << 18  # elements that are added up at a time on a CPU: they stay in the cache
INFINITY_BITS = 0x7F800000  # as a float32; larger patterns are NaN


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return indices (k,) int32 and magnitudes (k,) of ``x`` (numel,) with abs(x) >= threshold."""
    magnitudes = x.abs()
    places = torch.nonzero(magnitudes >= threshold).view(-1)
    return places.to(torch.int32), magnitudes[places]


def counted_above(x: Tensor, threshold: float | Tensor) -> tuple[Tensor, Lists]:
    """Return how many `above` finds (), and what makes its lists once the host has read that."""
    magnitudes = x.abs()
    mask = magnitudes >= threshold

    def lists(count: int) -> tuple[Tensor, Tensor]:
        places = places_of(mask, count)
        return places.to(torch.int32), magnitudes.index_select(0, places)

    return mask.sum(), lists


def places_of(mask: Tensor, count: int) -> Tensor:
    """Return the ascending places (count,) int64 at which ``mask`` is set, when it is known that there are so many."""
    return (torch.nonzero(mask) if mask.is_cpu else torch.nonzero_static(mask, size=count)).view(-1)


def above_by_piece(x: Tensor, pieces: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `above` does, with one threshold (S,) for each piece [start, stop) of ``pieces`` (S, 2) int64."""
    lengths = pieces[:, 1] - pieces[:, 0]
    total = int(lengths.sum())  # host sync: where it is another device's
    shifts = (pieces[:, 0] - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths, output_size=total)
    places = torch.arange(total, device=x.device) + shifts
    magnitudes = x.index_select(0, places).abs()
    cuts = thresholds.to(x.dtype).repeat_interleave(lengths, output_size=total)
    passing = torch.nonzero(magnitudes >= cuts).view(-1)
    return places[passing].to(torch.int32), magnitudes[passing]


def kth_by_run(magnitudes: Tensor, lengths: Tensor, ranks: Tensor) -> Tensor:
    """Return the ``ranks[s]``-th largest (S,) of ``magnitudes`` in each of neighbouring runs of ``lengths``."""
    falling = torch.sort(magnitudes, descending=True, stable=True).indices
    owner = torch.arange(lengths.numel(), device=lengths.device)
    owner = owner.repeat_interleave(lengths, output_size=magnitudes.numel())
    ordered = magnitudes[falling[torch.sort(owner[falling], stable=True).indices]]
    ends = torch.cat([ordered.new_zeros(1), ordered.new_full((1,), torch.inf)])
    place = (lengths.cumsum(0) - lengths + ranks - 1).where(ranks <= lengths, torch.full_like(ranks, -2))
    return torch.cat([ordered, ends])[place.where(ranks >= 1, torch.full_like(ranks, -1))]


def absorb_(residual: Tensor, grad: Tensor) -> FirstBad:
    """Add ``grad`` (numel,) to ``residual`` and set it to zero; return where the first sum is too large."""
    if grad.device.type == "cpu" and is_ordinary(grad, residual.dtype):
        residual.add_(grad)
        grad.zero_()
        return None
    total = residual + grad
    fits = fitting(total)
    kept = residual.where((grad - grad) != 0, 0.0)  # where the gradient is not finite: isfinite is four kernels
    torch.where(fits, total, kept, out=residual)
    grad.zero_()
    return first_bad_of(fits)


def first_bad_of(fits: Tensor) -> FirstBad:
    """Return the index of the first element of ``fits`` (numel,) that is False; see micro.values.finite.FirstBad."""
    if fits.device.type == "cpu":
        bad = torch.nonzero(~fits).view(-1)
        return int(bad[0]) if bad.numel() else None
    numel = fits.numel()
    places = torch.arange(numel or 1, dtype=torch.int32, device=fits.device)
    return torch.where(fits, numel, places).amin(0, keepdim=True) if numel else places


def absorb_and_sum_(residual: Tensor, grad: Tensor) -> tuple[FirstBad, list[float]]:
    """Do what ``absorb_`` does; return what it does, and the residual's sums."""
    first_bad = absorb_(residual, grad)
    return first_bad, sums(residual, -1.0)


def limit(dtype: torch.dtype) -> float:
    """Return the magnitude from which on a number counts as infinite, so that sums over ranks stay finite."""
    return 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 28)


def fitting(vector: Tensor) -> Tensor:
    """Return (numel,) bool: where ``vector`` is not NaN, infinite, or counts as it."""
    return vector.abs() < limit(vector.dtype)


def is_ordinary(grad: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``grad`` (numel,) is finite, and small beside the limit of ``dtype``: no sum with it can be too large.

    It costs one read. A residual just below the limit may come to lie just above it, which does no harm.
    """
    if not grad.numel():
        return True
    lowest, highest = torch.stack(torch.aminmax(grad)).tolist()  # host sync: what goes on depends on it
    return bool(max(-lowest, highest) < limit(dtype) * 2.0**-16)  # False with NaN, which aminmax passes on


def first_nonfinite(vector: Tensor) -> int | None:
    """Return the index of the first NaN or Inf in ``vector`` (numel,), or None; costs one read of it.

    A sum is NaN or Inf when any term is. It can also overflow, so the elements decide in the end.
    """
    wide = torch.promote_types(vector.dtype, torch.float32)
    if math.isfinite(float(vector.sum(dtype=wide))):  # host sync: what goes on depends on it
        return None
    bad = torch.nonzero(~torch.isfinite(vector)).view(-1)
    return int(bad[0]) if bad.numel() else None  # host sync: only after something was found


def magnitude_counts(x: Tensor, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor:
    """Return (num_bins,) int32 counts of magnitudes by ranges of float32 bit patterns."""
    bits = x.to(torch.float32).abs().view(torch.int32)
    bins = (bits - first_bit_pattern) >> shift
    is_counted = (bits >= max(first_bit_pattern, 1)) & (bits < INFINITY_BITS) & (bins < num_bins)
    return torch.bincount(bins.where(is_counted, num_bins), minlength=num_bins + 1)[:num_bins].to(torch.int32)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (min(k, numel),) int32 indices of the k largest magnitudes; ties go to the lowest index."""
    if k >= x.numel():
        return torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    magnitudes = x.abs()
    if not x.is_cpu and x.numel() <= MOST_SORTED:
        return magnitudes.sort(descending=True, stable=True).indices[:k].sort().values.to(torch.int32)
    smallest = torch.topk(magnitudes, k, sorted=False).values.min()
    keep = magnitudes > smallest
    ties = magnitudes == smallest
    keep |= ties & (ties.cumsum(0, dtype=torch.int32) <= k - keep.sum())
    return places_of(keep, k).to(torch.int32)


def first_distinct(indices: Tensor, numel: int, k: int) -> Tensor:
    """Return, in ascending order, the first k that differ of ``indices`` (m,)."""
    if k >= indices.numel():
        ascending: Tensor = torch.unique(indices)
        return ascending
    ordered, places = torch.sort(indices, stable=True)
    is_first = are_first(ordered)
    ordered, places = ordered[is_first], places[is_first]
    return ordered if places.numel() <= k else ordered[places < places.sort().values[k]]


def are_first(ordered: Tensor) -> Tensor:
    """Return (m,) bool: which of ``ordered`` (m,) differ from the one before."""
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    return is_first


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x`` at ``indices``."""
    return x.index_select(0, indices)


def add_at_(x: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> None:
    """Add ``alpha`` times ``values`` to ``x`` at ``indices``."""
    x.index_add_(0, indices, values.to(x.dtype), alpha=alpha)


def added(indices: Tensor, values: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the union of lists of indices and the sums of their values, added in the order given."""
    union = torch.unique(indices)
    total = values.new_zeros(union.numel())
    places = torch.searchsorted(union, indices).split(list(counts))
    for place, part in zip(places, values.split(list(counts)), strict=True):  # in turn: the same bits everywhere
        total.index_add_(0, place, part)  # each part has an index only once
    return union, total


def common(indices: Tensor, values: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries whose indices are in ``among`` (K,) too."""
    if not among.numel():
        return indices[:0], values[:0]
    places = torch.searchsorted(among, indices).clamp_(max=among.numel() - 1)
    kept = torch.nonzero(among.index_select(0, places) == indices).view(-1)
    return indices.index_select(0, kept), values.index_select(0, kept)


def sums(x: Tensor, floor: float) -> list[float]:
    """Return the numbers of `Sums` of those of ``x`` (numel,) whose magnitude is larger than ``floor``."""
    chunks = x.split(CHUNK) if x.device.type == "cpu" else (x,)
    rows = torch.stack([_sums_of_chunk(chunk, floor) for chunk in chunks])
    largest, smallest = rows[:, 4].max(), rows[:, 5].min()
    together: list[float] = torch.cat([rows[:, :4].sum(0), torch.stack([largest, smallest])]).tolist()
    return together  # host sync: a threshold follows from them


def _sums_of_chunk(chunk: Tensor, floor: float) -> Tensor:
    magnitudes = chunk.abs()
    counts = magnitudes > floor
    value, magnitude = chunk.where(counts, 0).double(), magnitudes.where(counts, 0).double()
    least = magnitudes.where(counts, torch.inf).double()
    if not chunk.numel():
        return torch.cat([value.new_zeros(5), value.new_full((1,), torch.inf)])
    sums = counts.sum().double(), value.sum(), magnitude.square().sum(), magnitude.sum(), magnitude.max(), least.min()
    return torch.stack(sums)


def collect(
    x: Tensor, start: int, lowest: int, shift: int, found: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, magnitudes and counts by bin of what reaches ``lowest``, ``found`` or not; see micro.kernels.

    Bin b begins at the magnitude whose float32 has the bits ``lowest + (b << shift)``; the last one has no end.
    """
    places, magnitudes = found or above(x, reaching(lowest, x.dtype))
    magnitudes = magnitudes.to(torch.float32)
    return places + start, magnitudes, _bin_counts(_bins(magnitudes, lowest, shift))


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


def _bin_counts(bins: Tensor) -> Tensor:
    """Return (NUM_BINS,) int32 counts of ``bins`` (m,); of an accelerator `torch.bincount` would read the largest."""
    if bins.device.type == "cpu":
        return torch.bincount(bins, minlength=NUM_BINS).to(torch.int32)
    counts = torch.zeros(NUM_BINS, dtype=torch.int32, device=bins.device)
    return counts.index_add_(0, bins, torch.ones_like(bins))
