"""Triton's kernels, run by its interpreter on the CPU, equal the reference."""

import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.interpreted import kernels as interpreted, serving_the_cpu  # isort: skip  # before what imports triton

from micro import ErrorFeedback, kernels
from micro.codecs import agreeing
from micro.codecs.fused import FusedCodec
from micro.codecs.half import Half
from micro.codecs.int8 import Int8
from micro.codecs.sign import Sign
from micro.kernels import reference, sums
from micro.kernels.triton import checking, codes, decoding, scanning, summing
from tests.products import grid

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy, of the interpreter

LENGTHS = [0, 1, 15, 17, 1024, 2077]  # around the 16 elements of aligned loads and the 1,024 of a program
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ONE_HALF = 0x3F000000  # as bits of a float32
KEY = (1, 2)


@pytest.fixture(autouse=True)
def interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton know what it is used for: it imports more of itself when it first runs a kernel."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vectors(numel: int, dtype: torch.dtype, *, bad: bool = False) -> tuple[Tensor, Tensor]:
    """Return a residual and a gradient, with NaN, Inf and a number that is too large in it where there is room."""
    residual, grad = normal(numel, torch.promote_types(dtype, torch.float32)), normal(numel, dtype, seed=1)
    if bad and numel:
        residual[numel // 3] = 0.75 * reference.limit(residual.dtype)
        grad[numel // 3] = min(0.75 * reference.limit(residual.dtype), torch.finfo(dtype).max)
        grad[numel // 2] = -math.inf
        grad[-1] = math.nan
    return residual, grad


def same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


@grid(numel=LENGTHS, dtype=DTYPES, bad=[False, True])
def test_absorb(numel: int, dtype: torch.dtype, bad: bool) -> None:
    residual, grad = vectors(numel, dtype, bad=bad)
    expected, source = residual.clone(), grad.clone()
    assert interpreted.absorb_(residual, grad) == reference.absorb_(expected, source)
    assert same(residual, expected)
    assert not grad.any()


@grid(numel=LENGTHS, dtype=DTYPES, threshold=[0.0, 1.5, 1e39, math.nan])
def test_above(numel: int, dtype: torch.dtype, threshold: float) -> None:
    x = normal(numel, dtype)
    x[::7], x[3::29], x[5::31] = 0.0, math.nan, -math.inf
    expected = reference.above(x, threshold)
    assert all(map(same, interpreted.above(x, threshold), expected))


@grid(numel=LENGTHS, dtype=DTYPES, bins=[(0, 20, 2040), (ONE_HALF, 18, 32), (0x3F812345, 0, 7), (1, 26, 4)])
def test_magnitude_counts(numel: int, dtype: torch.dtype, bins: tuple[int, int, int]) -> None:
    x = normal(numel, dtype)
    x[::7], x[3::29], x[5::31] = 0.0, math.nan, -math.inf
    assert same(interpreted.magnitude_counts(x, *bins), reference.magnitude_counts(x, *bins))


def test_a_program_of_the_histogram_takes_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SCAN_PROGRAMS", 2)
    x = normal(5000)
    assert same(interpreted.magnitude_counts(x, 0, 20, 2040), reference.magnitude_counts(x, 0, 20, 2040))


@grid(numel=LENGTHS, dtype=DTYPES, floor=[-1.0, 0.0, 1.25, 1e30], scale=[1.0, 2.0**90])
def test_sums(numel: int, dtype: torch.dtype, floor: float, scale: float) -> None:
    x = normal(numel, dtype)
    x[::7] = 0.0
    x *= scale if dtype != torch.float16 else 1.0
    assert checking.are_near(summing.sums(x, floor), sums.in_torch(x, floor))


@grid(numel=LENGTHS, dtype=DTYPES, bad=[False, True])
def test_absorb_and_sum(numel: int, dtype: torch.dtype, bad: bool) -> None:
    residual, grad = vectors(numel, dtype, bad=bad)
    expected, source = residual.clone(), grad.clone()
    first_bad, found = summing.absorb_and_sum_(residual, grad)
    assert same(first_bad, reference.absorb_flagged_(expected, source))
    assert same(residual, expected)
    assert checking.are_near(found, sums.in_torch(expected, -1.0))


def test_sums_that_are_not_near_are_named() -> None:
    x = normal(2077)
    right = sums.in_torch(x, -1.0)
    for place in range(len(right)):
        wrong = [number * (1 + 1e-5 * (i == place)) for i, number in enumerate(right)]
        assert checking.are_near(wrong, right) == (place == 1), "the total is small beside what it is a sum of"


@grid(make=[torch.ones, torch.zeros, normal, lambda n: torch.arange(n).float()], k=[1, 100, 2000])
def test_largest_is_exact_whatever_the_sample_says(make: object, k: int) -> None:
    x = make(9000)  # type: ignore[operator]
    assert same(interpreted.largest(x, k, 500), reference.largest(x, k))
    x[:: 9000 // 500] = 1e-3  # the sample shows nothing of the rest
    assert same(interpreted.largest(x, k, 500), reference.largest(x, k))


def test_codes_have_no_kernels_for_blocks_that_do_not_fill_whole_bytes_or_tiles() -> None:
    wire = torch.empty(1000, dtype=torch.uint8)
    for block in (8, 100, 4096):
        assert Sign(block=block).encoding(codes, wire, 50, KEY) is None
        assert agreeing.pairs(Sign(block=block), normal(50), torch.device("cpu"), codes) == []


@pytest.mark.parametrize("codec", [Half(), Int8(), Int8(stochastic=True), Sign()])
def test_a_codec_is_served_on_a_device_where_its_kernels_agree_with_torch(codec: FusedCodec) -> None:
    device = torch.device("cpu")  # the interpreter runs what a GPU would
    agreeing.agrees.cache_clear()
    assert agreeing.agrees(codec, device)
    agreeing.agrees.cache_clear()
    decode = decoding.decode
    with (
        patch.object(decoding, "decode", lambda *args, **more: decode(*args, **more) if args[3].mul_(2) is None else 0),
        pytest.warns(UserWarning, match=f"torch does the work of the kernels of codec {codec.name} on cpu"),
    ):
        assert not agreeing.agrees(codec, device)
    agreeing.agrees.cache_clear()


@pytest.fixture
def cpu_as_gpu() -> Iterator[None]:
    """Let the kernels serve tensors of the CPU; what checks a device has a test of its own."""
    with serving_the_cpu():
        yield


@pytest.mark.usefixtures("cpu_as_gpu")
def test_kernels_are_chosen_for_tensors_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("absorb_", "absorb_flagged_", "above", "magnitude_counts", "largest"):
        monkeypatch.setattr(reference, name, None)
    memory = ErrorFeedback().start(50, torch.bfloat16, torch.device("cpu"))
    acc, first_bad = ErrorFeedback().accumulate_(memory, torch.ones(50, dtype=torch.bfloat16), world_size=1)
    assert acc.tolist() == [1.0] * 50
    assert isinstance(first_bad, Tensor)
    assert first_bad.tolist() == [50]  # unread: none
    assert kernels.above(acc.to(torch.float16), 0.5).tolist() == list(range(50))
    assert kernels.magnitude_counts(acc, first_bit_pattern=0, shift=23, num_bins=256).tolist()[127] == 50


@pytest.mark.usefixtures("cpu_as_gpu")
def test_top_k_of_a_gpu_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SAMPLE", 400)
    assert same(kernels.largest(normal(4000), 30), reference.largest(normal(4000), 30))


@pytest.mark.usefixtures("cpu_as_gpu")
def test_what_the_kernels_do_not_take_the_reference_does() -> None:
    x = normal(100)
    for other in (x[::2], x.to(torch.float8_e5m2), x.as_subclass(Flat)):
        assert not kernels.on_gpu(other)
    assert kernels.above(x[::2], 1.0).tolist() == reference.above(x[::2], 1.0)[0].tolist()


class Flat(Tensor):
    pass


@pytest.mark.usefixtures("cpu_as_gpu")
def test_a_device_on_which_no_kernel_runs_is_named_once_and_served_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(interpreted, "check", fail)
    with pytest.warns(UserWarning, match="torch does the work of micro's kernels on cpu.*no C compiler") as heard:
        found = [kernels.above(torch.ones(5, dtype=torch.float64), 0.5).tolist() for _ in range(2)]
    assert found == [[0, 1, 2, 3, 4]] * 2
    assert len(heard) == 1


def test_tensors_of_a_cpu_never_meet_triton() -> None:
    assert not kernels.on_gpu(torch.ones(5))


def test_a_device_is_checked_before_its_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "NUMEL", 5_001)
    checking.check(torch.device("cpu"))
    for name, wrong in {
        "absorb_": lambda residual, grad: None,
        "above": lambda x, threshold: reference.above(x, 1.01 * threshold),
        "magnitude_counts": lambda *arguments: reference.magnitude_counts(*arguments) + 1,
        "largest": lambda x, k, sample: reference.largest(x, k + 1),
        "summing.sums": lambda x, floor: sums.in_torch(x, 1.01 * floor),
        "summing.absorb_and_sum_": lambda residual, grad: (torch.zeros(1), []),
    }.items():
        with monkeypatch.context() as patches:
            patches.setattr(f"{checking.__name__}.{name}", wrong)
            with pytest.raises(RuntimeError, match="gives another result than torch"):
                checking.check(torch.device("cpu"))
