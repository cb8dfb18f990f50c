"""A selection among slices that is cut by counts: the compiled loops and plain torch give what brute force gives."""

from types import ModuleType

import torch
from torch import Tensor

from micro import kernels
from micro.kernels import reference
from micro.kernels.magnitudes import NUM_BINS, bits_of_magnitude
from micro.selectors.micro import cut_of
from tests import parts
from tests.products import grid

LOWEST, SHIFT, START = bits_of_magnitude(1.0), 20, 1000
FORMS = [reference, *([kernels.module("cpu")] if kernels.has_numba() else [])]


def drawn(numel: int, seed: int = 0) -> Tensor:
    """Return (numel,) eighths: many ties."""
    return (16 * parts.normal(numel, seed=seed, dtype=torch.float32)).round() / 8


def bin_of(value: float) -> int:
    return min((bits_of_magnitude(abs(value)) - LOWEST) >> SHIFT, NUM_BINS - 1)


@grid(form=FORMS, numel=[0, 1, 17, 500])
def test_candidates_are_counted_by_magnitude(form: ModuleType, numel: int) -> None:
    x = drawn(numel)
    indices, magnitudes, counts = form.collect(x, START, LOWEST, SHIFT)
    passing = [i for i, value in enumerate(x.tolist()) if abs(value) >= 1.0]
    bins = [bin_of(x[i].item()) for i in passing]
    assert indices.tolist() == [START + i for i in passing]
    assert magnitudes.tolist() == [abs(x[i].item()) for i in passing]
    assert counts.tolist() == [bins.count(place) for place in range(NUM_BINS)]
    assert (indices.dtype, counts.dtype) == (torch.int32, torch.int32)


@grid(world_size=[1, 2, 7], k=[1, 10, 60, 10_000])
def test_ranks_share_the_bin_of_the_cut_in_proportion(world_size: int, k: int) -> None:
    counts = torch.randint(0, 9, (world_size, 32), generator=torch.Generator().manual_seed(k), dtype=torch.int32)
    cut = cut_of(counts, k)
    inside, above = counts[:, cut.bin].tolist(), counts[:, cut.bin + 1 :].sum(1).tolist()
    missing = sum(cut.taken) - sum(above)
    assert sum(cut.taken) == min(k, int(counts.sum())) == min(k, cut.num_candidates)
    assert 0 <= missing <= sum(inside)
    fair = [missing * count / max(sum(inside), 1) for count in inside]
    assert cut.shares == tuple(taken - over for taken, over in zip(cut.taken, above, strict=True))
    assert all(abs(share - part) < 1 for share, part in zip(cut.shares, fair, strict=True))
    rounded_up = [rank for rank in range(world_size) if cut.shares[rank] > fair[rank]]
    order = sorted(range(world_size), key=lambda r: (-round(fair[r] - int(fair[r]), 9), r))
    assert sorted(order[: len(rounded_up)]) == rounded_up  # the largest remainders, low ranks first among equals


@grid(form=FORMS, share=[0, 1, 2, 5])
def test_the_largest_are_kept_and_of_equals_the_first(form: ModuleType, share: int) -> None:
    indices, magnitudes, _ = reference.collect(drawn(400, seed=3), START, LOWEST, SHIFT)
    bottom, top = LOWEST + (4 << SHIFT), LOWEST + (5 << SHIFT)
    found = list(zip(indices.tolist(), magnitudes.tolist(), strict=True))
    above = [i for i, value in found if bits_of_magnitude(value) >= top]
    inside = sorted((-value, i) for i, value in found if bottom <= bits_of_magnitude(value) < top)
    assert len(inside) > 5
    expected = sorted(above + [i for _, i in inside[:share]])
    assert form.keep(indices, magnitudes, len(expected), bottom, top, share).tolist() == expected
