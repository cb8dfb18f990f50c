"""The scans equal brute force, whichever of their forms serves the tensor."""

import importlib.util
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from micro import kernels
from micro.kernels import reference
from micro.kernels.tiles import STRIP
from tests.products import grid

BLOCK = 1 << 16  # of the compiled scan: lengths around it are its corners
SCANS = pytest.mark.parametrize("above", [kernels.above_with_magnitudes, reference.above], ids=["kernel", "reference"])
TOPKS = pytest.mark.parametrize("largest", [kernels.largest, reference.largest], ids=["kernel", "reference"])


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def brute_above(x: Tensor, threshold: float) -> list[int]:
    cut = float(torch.tensor(threshold, dtype=torch.float64).to(x.dtype))
    return [i for i, value in enumerate(x.tolist()) if abs(value) >= cut]


def brute_largest(x: Tensor, k: int) -> list[int]:
    magnitudes = x.abs().tolist()
    return sorted(sorted(range(len(magnitudes)), key=lambda i: (-magnitudes[i], i))[:k])


@grid(
    above=[kernels.above_with_magnitudes, reference.above],
    numel=[0, 1, 15, 16, 17, 31, 33, 100, 1000],
    threshold=[0.0, 0.5, 1.5, 10.0],
    dtype=[torch.float32, torch.float64],
)
def test_above_is_brute_force(
    above: Callable[[Tensor, float], tuple[Tensor, Tensor]], numel: int, threshold: float, dtype: torch.dtype
) -> None:
    x = normal(numel, dtype)
    found, magnitudes = above(x, threshold)
    assert found.dtype == torch.int32
    assert found.tolist() == brute_above(x, threshold)
    assert torch.equal(magnitudes, x.abs()[found.long()])


@grid(numel=[BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7], threshold=[0.0, 0.01, 2.0, 6.0])
def test_above_equals_the_reference_across_blocks(numel: int, threshold: float) -> None:
    x = normal(numel)
    assert torch.equal(kernels.above(x, threshold), reference.above(x, threshold)[0])


@SCANS
def test_above_of_special_values(above: Callable[[Tensor, float], tuple[Tensor, Tensor]]) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([nan, inf, -inf, -nan, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38] * 4)  # lanes and the tail
    assert above(x, 0.0)[0].tolist() == [i for i in range(40) if i % 10 not in (0, 3)]
    assert above(x, -1.0)[0].tolist() == above(x, 0.0)[0].tolist()
    assert above(x, 1e-45)[0].tolist() == [i for i in range(40) if i % 10 in (1, 2, 6, 7, 8, 9)]
    assert above(x, inf)[0].tolist() == [i for i in range(40) if i % 10 in (1, 2)]
    assert above(x, 1e39)[0].tolist() == above(x, inf)[0].tolist()  # larger than any float32
    assert above(x, nan)[0].tolist() == []


@SCANS
def test_above_rounds_the_threshold_to_single_precision(
    above: Callable[[Tensor, float], tuple[Tensor, Tensor]],
) -> None:
    x = torch.full((20,), 0.1)  # a little more than the double 0.1
    assert above(x, 0.1)[0].numel() == 20
    assert above(x, float(x[0]))[0].numel() == 20
    assert above(x, 0.1 + 1e-12)[0].numel() == 20
    assert above(x, 0.1000001)[0].numel() == 0


def test_above_serves_slices_and_strided_vectors() -> None:
    x = normal(1000)
    for view in (x[3:777], x[::2], x[:0], x.expand(2, -1)[1]):
        assert kernels.above(view, 1.0).tolist() == brute_above(view, 1.0)


def test_above_leaves_its_input_alone_and_needs_no_gradient() -> None:
    x = normal(100).requires_grad_()
    kept = x.detach().clone()
    assert not kernels.above(x, 1.0).requires_grad
    assert torch.equal(x, kept)


@grid(largest=[kernels.largest, reference.largest], numel=[1, 2, 17, 300], dtype=[torch.float32, torch.float64])
def test_largest_is_brute_force(largest: Callable[[Tensor, int], Tensor], numel: int, dtype: torch.dtype) -> None:
    x = normal(numel, dtype)
    for k in {0, 1, 2, numel // 2, numel - 1, numel, numel + 5}:
        found = largest(x, k)
        assert found.dtype == torch.int32
        assert found.tolist() == brute_largest(x, k)


@TOPKS
@pytest.mark.parametrize("values", [[0.0], [1.0, -1.0], [0.0, 0.0, 0.0, 2.0], [3.0, 1.0, 1.0, -1.0, 0.5]])
def test_ties_go_to_the_lowest_index(largest: Callable[[Tensor, int], Tensor], values: list[float]) -> None:
    x = torch.tensor(values * 30)
    for k in range(0, len(x) + 1, 7):
        assert largest(x, k).tolist() == brute_largest(x, k)


LONG = 2 * kernels.SAMPLE + 12_345  # long enough to be sampled


def sparse_spikes(numel: int) -> Tensor:
    x = torch.zeros(numel)
    x[1 :: numel // 700] = normal(x[1 :: numel // 700].numel())
    return x


def hidden_from_the_sample(numel: int) -> Tensor:
    x = torch.full((numel,), 100.0)
    x[:: numel // kernels.SAMPLE] = 1e-3
    return x + normal(numel) * 1e-4


def only_in_the_sample(numel: int) -> Tensor:
    x = normal(numel)
    x[:: numel // kernels.SAMPLE] *= 1000
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        normal,
        torch.ones,
        torch.zeros,
        sparse_spikes,
        hidden_from_the_sample,
        only_in_the_sample,
        lambda numel: normal(numel).round(),
        lambda numel: torch.arange(numel, dtype=torch.float32),
    ],
    ids=["normal", "ones", "zeros", "spikes", "hidden", "shown", "rounded", "sorted"],
)
@pytest.mark.parametrize("numel", [LONG, 8 * kernels.SAMPLE])
def test_sampled_largest_is_exact_whatever_the_sample_says(make: Callable[[int], Tensor], numel: int) -> None:
    x = make(numel)
    for k in (1, 2, 100, 3000, numel // 5, numel // 4 + 1):
        assert kernels.largest(x, k).tolist() == brute_largest(x, k)


COUNTS = pytest.mark.parametrize(
    "count",
    [
        kernels.magnitude_counts,
        lambda x, **bins: reference.magnitude_counts(x, bins["first_bit_pattern"], bins["shift"], bins["num_bins"]),
    ],
    ids=["kernel", "reference"],
)


def brute_counts(x: Tensor, first: int, shift: int, num_bins: int) -> list[int]:
    counts = [0] * num_bins
    for value in x.to(torch.float32).tolist():
        (pattern,) = struct.unpack("=I", struct.pack("=f", abs(value)))
        if math.isfinite(value) and value and first <= pattern < first + (num_bins << shift):
            counts[(pattern - first) >> shift] += 1
    return counts


@COUNTS
@pytest.mark.parametrize(
    ("first", "shift", "num_bins"), [(0, 20, 2040), (0x3F000000, 18, 32), (0x3F812345, 0, 7), (1, 26, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_magnitude_counts_are_brute_force(
    count: Callable[..., Tensor], first: int, shift: int, num_bins: int, dtype: torch.dtype
) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -3.4e38, 1.00888], dtype=dtype)
    for x in (normal(1001, dtype), special, special[:0], normal(999, dtype)[::3]):
        got = count(x, first_bit_pattern=first, shift=shift, num_bins=num_bins)
        assert got.dtype == torch.int32
        assert got.tolist() == brute_counts(x, first, shift, num_bins)


@pytest.mark.parametrize("absorb_", [kernels.absorb_, reference.absorb_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_absorb_keeps_zero_where_sums_are_so_large_that_those_over_ranks_could_overflow(
    absorb_: Callable[[Tensor, Tensor], int | None], dtype: torch.dtype
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    large = reference.limit(wide)
    grad = torch.tensor([0.0, large, -large / 2, math.nan, 1.0, 1e20, large / 4], dtype=dtype)
    residual = torch.tensor([large / 2, large / 2, -large / 2, 2.0, large / 2, 1.0, -large / 2], dtype=wide)
    expected = residual + grad
    expected[1:4] = torch.tensor([0.0, 0.0, 2.0], dtype=wide)
    assert absorb_(residual, grad) == 1
    assert torch.equal(residual, expected)
    assert residual.isfinite().all()
    assert not grad.any()


@grid(
    absorb_=[kernels.absorb_, reference.absorb_],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    numel=[0, 1, 4095, 4096, 4097, 10000],
)
def test_absorb_adds_what_is_finite_and_clears(
    absorb_: Callable[[Tensor, Tensor], int | None], dtype: torch.dtype, numel: int
) -> None:
    residual, grad = normal(numel, torch.promote_types(dtype, torch.float32)), normal(numel, dtype, seed=1)
    expected = residual + grad
    assert absorb_(residual, grad) is None
    assert torch.equal(residual, expected)
    assert not grad.any()
    if numel < 4097:
        return
    grad = normal(numel, dtype, seed=2)
    grad[4096], grad[numel - 1] = math.nan, -math.inf
    expected = residual + torch.where(torch.isfinite(grad), grad, 0)
    assert absorb_(residual, grad) == 4096
    assert torch.equal(residual, expected)
    assert not grad.any()


@grid(dtype=[torch.float32, torch.bfloat16, torch.float64], numel=[1, 10_000])
def test_a_residual_that_decays_gives_the_bits_of_two_operations(dtype: torch.dtype, numel: int) -> None:
    residual, grad = normal(numel, torch.promote_types(dtype, torch.float32)), normal(numel, dtype, seed=1)
    expected = residual.mul(0.999).add(grad)
    assert kernels.absorb_(residual, grad, decay=0.999) is None
    assert torch.equal(residual, expected)
    assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_absorb_takes_every_number_of_16_bits(dtype: torch.dtype) -> None:
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    residual, other = normal(2**16), normal(2**16)
    expected = grad.clone()
    assert kernels.absorb_(residual, grad) == reference.absorb_(other, expected)
    assert torch.equal(residual, other)
    assert not grad.view(torch.int16).any()


def test_without_a_writable_folder_loops_are_compiled_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a read-only installation whose user has no home: numba raises then, and no ImportError."""
    numba = pytest.importorskip("numba")
    source = shutil.copy(str(Path(reference.__file__).with_name("cpu.py")), tmp_path)
    (tmp_path / "__pycache__").touch()  # no folder, so that nothing can be written into it, not even by root
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    spec = importlib.util.spec_from_file_location("cpu_without_cache", source)
    assert spec is not None
    assert spec.loader is not None
    loops = importlib.util.module_from_spec(spec)
    with pytest.warns(UserWarning, match="compiles its loops again in each process.*set NUMBA_CACHE_DIR") as reported:
        spec.loader.exec_module(loops)
    assert len(reported) == 1
    residual, grad = torch.ones(5), torch.arange(5.0)
    assert loops.absorb_(residual, grad) is None
    assert residual.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_the_adding_pass_finds_the_first_bad_place_in_any_strip(decay: float, dtype: torch.dtype) -> None:
    for place in (0, STRIP - 1, STRIP, 3 * STRIP + 7):
        residual, grad = torch.full((4 * STRIP + 9,), 2.0), torch.ones(4 * STRIP + 9, dtype=dtype)
        grad[place], grad[-1] = torch.nan, torch.inf
        assert kernels.absorb_(residual, grad, decay=decay) == place
        assert not grad.any()
        assert residual[[place, -1]].tolist() == [2 * decay] * 2  # what is bad is left out
        assert (residual == 2 * decay + 1).sum() == residual.numel() - 2
