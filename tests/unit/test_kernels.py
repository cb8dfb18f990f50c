"""Operations equal brute force, in every form: numba serves single precision, plain torch double."""

import importlib.util
import logging
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from micro import kernels
from micro.kernels import reference, sampling, threads
from micro.values.randomness import generator
from tests.operations import CASES, KINDS, LENGTHS, assert_same, vector
from tests.products import grid

BLOCK = 1 << 16  # block of numba's scan: lengths near it are its corner cases
DTYPES = [torch.float32, torch.float64]


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return vector("normal", numel, dtype, seed)


def brute_above(x: Tensor, threshold: float) -> list[int]:
    cut = float(torch.tensor(threshold, dtype=torch.float64).to(x.dtype))
    return [i for i, value in enumerate(x.tolist()) if abs(value) >= cut]


def brute_largest(x: Tensor, k: int) -> list[int]:
    magnitudes = x.abs().tolist()
    return sorted(sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))[:k])


@contextmanager
def many_parts(num_threads: int) -> Iterator[None]:
    """Have loops share out vectors of 1,024 elements among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    with patch.object(threads, "LEAST", 1 << 10), patch.object(sampling, "SAMPLE", 512):
        yield
    torch.set_num_threads(before)


def test_every_operation_has_a_case() -> None:
    assert CASES.keys() == kernels.TABLE.keys()


@pytest.mark.skipif(not kernels.has_numba(), reason="numba is not installed")
@grid(operation=CASES, kind=KINDS, numel=LENGTHS, num_threads=[1, 3])
def test_numba_gives_what_torch_gives(operation: str, kind: str, numel: int, num_threads: int) -> None:
    with many_parts(num_threads):
        for given in CASES[operation](kind, numel, torch.float32):
            assert_same(operation, getattr(kernels.module(kernels.TABLE[operation].numba or ""), operation), given)


@grid(numel=[0, 1, 16, 33, 1000, BLOCK + 1], threshold=[0.0, 0.5, 1.5, 10.0], dtype=DTYPES)
def test_above(numel: int, threshold: float, dtype: torch.dtype) -> None:
    x = normal(numel, dtype)
    found, magnitudes = kernels.above(x, threshold)
    assert found.dtype == torch.int32
    assert found.tolist() == brute_above(x, threshold)
    assert torch.equal(magnitudes, x.abs()[found.long()])


@pytest.mark.parametrize("tried", [(), kernels.TRIED])
def test_above_of_special_values_and_thresholds_between_numbers(
    tried: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TRIED", tried)
    inf, nan = math.inf, math.nan
    x = torch.tensor([nan, inf, -inf, -nan, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38] * 4)  # lanes and the tail
    for threshold, passing in {
        0.0: (1, 2, 4, 5, 6, 7, 8, 9),
        -1.0: (1, 2, 4, 5, 6, 7, 8, 9),
        1e-45: (1, 2, 6, 7, 8, 9),
        inf: (1, 2),
        1e39: (1, 2),  # larger than any float32
        nan: (),
    }.items():
        assert kernels.above(x, threshold)[0].tolist() == [i for i in range(40) if i % 10 in passing]
    x = torch.full((20,), 0.1)  # a little more than the double 0.1, which is rounded to it
    cuts = (0.1, float(x[0]), 0.1 + 1e-12, 0.1000001)
    assert [kernels.above(x, cut)[0].numel() for cut in cuts] == [20, 20, 20, 0]


def test_above_serves_slices_and_strided_vectors_and_leaves_them_alone() -> None:
    x = normal(1000).requires_grad_()
    before = x.detach().clone()
    for view in (x[3:777], x[::2], x[:0], x.expand(2, -1)[1]):
        found, _ = kernels.above(view, 1.0)
        assert found.tolist() == brute_above(view, 1.0)
        assert not found.requires_grad
    assert torch.equal(x, before)


@grid(kind=["normal", "tied", "small"], numel=[1, 2, 17, 300, 16_385], dtype=DTYPES)
def test_largest(kind: str, numel: int, dtype: torch.dtype) -> None:
    x = vector(kind, numel, dtype)
    for k in {0, 1, 2, numel // 2, numel - 1, numel, numel + 5}:
        found = kernels.largest(x, k)
        assert found.dtype == torch.int32
        assert found.tolist() == brute_largest(x, k)


def with_sample(numel: int, rest: float, sampled: float) -> Tensor:
    """Return normal values, those that the sample sees and the others times a factor of their own."""
    x = rest * (1 + normal(numel) * 1e-4)
    x[:: numel // sampling.SAMPLE] *= sampled / rest
    return x


@pytest.mark.slow
@grid(
    make=[
        torch.ones,
        torch.zeros,
        lambda numel: with_sample(numel, 100.0, 1e-3),
        lambda numel: with_sample(numel, 1.0, 1000.0),
        lambda numel: normal(numel).round(),
        lambda numel: torch.arange(numel, dtype=torch.float32),
    ],
    numel=[2 * sampling.SAMPLE + 12_345, 8 * sampling.SAMPLE],
)
def test_largest_is_exact_whatever_the_sample_says(make: Callable[[int], Tensor], numel: int) -> None:
    x = make(numel)
    for k in (1, 100, 3000, numel // 5, numel // 4 + 1):
        assert kernels.largest(x, k).tolist() == brute_largest(x, k)


@grid(dtype=DTYPES, bins=[(0, 20, 2040), (0x3F000000, 18, 32), (0x3F812345, 0, 7), (1, 26, 4)])
def test_magnitude_counts(dtype: torch.dtype, bins: tuple[int, int, int]) -> None:
    first, shift, num_bins = bins
    for x in (vector("special", 1001, dtype), normal(999, dtype)[::3], normal(0, dtype)):
        counts = [0] * num_bins
        for value in x.to(torch.float32).tolist():
            (pattern,) = struct.unpack("=I", struct.pack("=f", abs(value)))
            if math.isfinite(value) and value and first <= pattern < first + (num_bins << shift):
                counts[(pattern - first) >> shift] += 1
        found = kernels.magnitude_counts(x, first_bit_pattern=first, shift=shift, num_bins=num_bins)
        assert found.dtype == torch.int32
        assert found.tolist() == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_absorb_keeps_zero_where_sums_are_so_large_that_those_over_ranks_could_overflow(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    large = reference.limit(wide)
    grad = torch.tensor([0.0, large, -large / 2, math.nan, 1.0, 1e20, large / 4], dtype=dtype)
    residual = torch.tensor([large / 2, large / 2, -large / 2, 2.0, large / 2, 1.0, -large / 2], dtype=wide)
    expected = residual + grad
    expected[1:4] = torch.tensor([0.0, 0.0, 2.0], dtype=wide)
    assert kernels.absorb_(residual, grad) == 1
    assert torch.equal(residual, expected)
    assert not grad.any()


@grid(dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16], place=[None, 0, 511, 512, 4096])
def test_absorb_adds_what_is_finite_and_clears(dtype: torch.dtype, place: int | None) -> None:
    residual, grad = normal(9000, torch.promote_types(dtype, torch.float32)), normal(9000, dtype, seed=1)
    if place is not None:
        grad[place], grad[-1] = math.nan, -math.inf
    expected = residual + torch.where(torch.isfinite(grad), grad, 0)
    assert kernels.absorb_(residual, grad) == place
    assert torch.equal(residual, expected)
    assert not grad.any()


@grid(numel=[1, 64, 65, 100_000], count=[0, 1, 64, 5000], dtype=[torch.int32, torch.int64])
def test_the_first_that_differ_by_a_map_and_by_sorting(numel: int, count: int, dtype: torch.dtype) -> None:
    indices = torch.randint(numel, (count,), generator=generator(numel, count)).to(dtype)
    in_turn = list(dict.fromkeys(indices.tolist()))
    assert kernels.distinct(indices[::2], numel).tolist() == sorted(set(indices[::2].tolist()))
    for k in {0, 1, len(in_turn) // 2, len(in_turn), count + 1}:
        found = kernels.first_distinct(indices, numel, k)
        assert found.dtype == dtype
        assert found.tolist() == sorted(in_turn[:k])


@grid(count=[2, 9000], index=[-1, 3])
def test_no_index_lies_outside(count: int, index: int) -> None:
    indices, ones = torch.tensor([0, index], dtype=torch.int32).repeat_interleave(count // 2), torch.ones(count)
    for operation, more in ((kernels.gather, ()), (kernels.add_at_, (ones,))):
        with pytest.raises((IndexError, RuntimeError)):
            operation(torch.zeros(3), indices, *more)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_are_added_whatever_their_order_and_a_sum_is_never_minus_zero(dtype: torch.dtype) -> None:
    indices = torch.tensor([4, 1, 1, 5, 0], dtype=torch.int32)  # the first list does not ascend
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, -0.0], dtype=dtype)
    union, total = kernels.added(indices, values, [2, 2, 1])
    assert (union.tolist(), total.tolist()) == ([0, 1, 4, 5], [0.0, 5.0, 1.0, 4.0])
    assert not total.signbit().any()


@grid(numel=[0, 1, 31, 4101], scale=[1e-30, 1.0, 1e25], floor=[-1.0, 0.0, 1.2, 10.0], dtype=DTYPES)
def test_sums_include_exactly_the_larger_elements(numel: int, scale: float, floor: float, dtype: torch.dtype) -> None:
    x = normal(numel, dtype) * scale
    floor = float(torch.tensor(floor * scale if floor >= 0 else floor, dtype=dtype))
    kept = x[x.abs() > floor].double()
    sizes, sums = kept.abs(), kernels.sums_above(x, floor)
    assert sums.count == kept.numel()
    assert sums.total == pytest.approx(float(kept.sum()), rel=1e-5, abs=3e-6 * float(sizes.sum()))
    expected = float(kept.square().sum()), float(sizes.sum())
    assert (sums.squares, sums.magnitudes) == pytest.approx(expected, rel=3e-6, abs=0)
    assert sums.largest == max(sizes.tolist(), default=0.0)
    assert floor < 0 or sums.smallest == min(sizes.tolist(), default=math.inf)


def test_numba_does_not_log_its_steps_where_a_program_logs_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("numba")
    kernels.module("jit")
    with caplog.at_level(logging.DEBUG):
        assert not logging.getLogger("numba.core.ssa").isEnabledFor(logging.DEBUG)


def test_without_a_writable_folder_loops_are_compiled_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a read-only installation whose user has no home: numba raises then, and no ImportError."""
    numba = pytest.importorskip("numba")
    source = shutil.copy(str(Path(reference.__file__).with_name("lists.py")), tmp_path)
    (tmp_path / "__pycache__").touch()  # no folder, so that nothing can be written into it, not even by root
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    spec = importlib.util.spec_from_file_location("lists_without_cache", source)
    assert spec is not None
    assert spec.loader is not None
    loops = importlib.util.module_from_spec(spec)
    with pytest.warns(UserWarning, match="set NUMBA_CACHE_DIR") as reported:
        spec.loader.exec_module(loops)
    assert len(reported) == 1
    assert loops.gather(torch.arange(5.0), torch.tensor([4, 0], dtype=torch.int32)).tolist() == [4.0, 0.0]
