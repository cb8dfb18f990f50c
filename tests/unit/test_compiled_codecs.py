"""Compiled codecs equal codecs in torch bit for bit: codes, decoded values and residuals."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from micro import kernels
from micro.codecs import coding
from micro.codecs.base import Codec
from micro.codecs.half import BFloat16, Half
from micro.codecs.int8 import Int8
from micro.codecs.qsgd import QSGD
from micro.kernels import threads
from tests import parts
from tests.products import grid

pytestmark = pytest.mark.skipif(kernels.codes_for(Int8().code, torch.ones(1)) is None, reason="numba is not installed")
KEY = (1, 2, 3)
CODECS: dict[str, Codec] = {
    "half": Half(),
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "int8, short blocks": Int8(block=24),
    "int8, at random": Int8(stochastic=True),  # torch codes it
    "qsgd": QSGD(),
    "qsgd, 7 bits, short blocks": QSGD(bits=7, block=40),
    "qsgd, 16 bits, as published": QSGD(bits=16, rule="published"),
    "qsgd, no whole bytes": QSGD(block=13),  # torch codes it
}


def test_the_processor_is_asked_once_what_it_can_do() -> None:
    served = kernels.codes_for(Half().code, torch.ones(1))
    with patch("llvmlite.binding.get_host_cpu_features", side_effect=AssertionError("takes 0.4 ms")):
        assert kernels.codes_for(Half().code, torch.ones(1)) is served


def normal(count: int, seed: int = 0) -> Tensor:
    return parts.normal(count, seed=seed, dtype=torch.float32)


def patterns(count: int) -> Tensor:
    """Return finite numbers of all magnitudes, those without a leading digit, and both zeros among them."""
    x = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(count)).to(torch.int32)
    x = x.view(torch.float32).nan_to_num_(nan=0.0)
    at_ends = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38, 65519.0, 65520.0, 2.0**-25])
    x[::5] = at_ends.repeat(count)[: x[::5].numel()]
    return x


def in_torch() -> Any:
    return patch.object(kernels, "TRIED", ())


@contextmanager
def on_threads(num_threads: int) -> Iterator[None]:
    """Have loops share out short vectors among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    with patch.object(threads, "LEAST", 1 << 10):
        yield
    torch.set_num_threads(before)


def at_odd_address(data: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]


@grid(name=CODECS, make=[normal, patterns, torch.zeros], count=[0, 1, 7, 64, 1025, 9000])
def test_wires_and_values_are_the_bits_that_torch_gives(name: str, make: Any, count: int) -> None:
    codec, values = CODECS[name], make(count)
    wire = coding.encode(codec, values, KEY)
    assert wire.numel() == codec.num_bytes(count, torch.float32)
    with in_torch():
        assert torch.equal(wire, coding.encode(codec, values, KEY))
        expected = coding.decode(codec, wire, count, torch.float32)
    assert torch.equal(coding.decode(codec, wire, count, torch.float32), expected)
    wide = coding.decode(codec, coding.encode(codec, values.double(), KEY), count, torch.float64)
    assert torch.equal(wide, expected.double()), "the same numbers, of double precision"


@grid(name=CODECS, bad=[None, math.nan, 3e38], dtype=[torch.float32, torch.bfloat16], in_place=[False, True])
def test_a_gradient_is_added_on_the_way_and_the_rest_is_what_is_left(
    name: str, bad: float | None, dtype: torch.dtype, in_place: bool
) -> None:
    codec, count = CODECS[name], 10_300
    values, grad = normal(count), normal(count, seed=1).to(dtype)
    if bad is not None:
        grad[[9_001, 9_100]] = bad
    acc = values.clone()
    first_bad = kernels.absorb_(acc, grad.clone())
    wire = at_odd_address(torch.zeros(codec.num_bytes(count, torch.float32), dtype=torch.uint8))
    rest = values if in_place else torch.zeros(count)
    assert coding.encode_(codec, values, KEY, wire, rest, grad=grad) == first_bad == (None if bad is None else 9_001)
    with in_torch():
        assert torch.equal(wire, codec.encode(acc, KEY))
        assert torch.equal(rest, acc - codec.decode(wire, count, torch.float32))
    assert in_place or torch.equal(values, acc)


@grid(name=CODECS, num_threads=[1, 3], others=[0, 2], bad=[None, math.nan])
def test_a_mean_is_encoded_in_one_pass_as_in_several(
    name: str, num_threads: int, others: int, bad: float | None
) -> None:
    codec, count = CODECS[name], 70_001
    size, grad = codec.num_bytes(count, torch.float32), normal(count, seed=5)
    if bad is not None:
        grad[[66_000, 66_001]] = bad
    wires = torch.zeros(others, size + 1, dtype=torch.uint8)[:, :size]  # every other one begins at an odd address
    for row, message in enumerate(wires):
        coding.encode_(codec, normal(count, seed=row), KEY, message)
    acc, values = normal(count, seed=9), normal(count, seed=9)
    first_bad = kernels.absorb_(acc, grad.clone())
    total, left, expected = torch.zeros(count), torch.empty(count), torch.empty(size, dtype=torch.uint8)
    with in_torch():
        if others:
            coding.decode_mean_(codec, wires, total)
        coding.encode_(codec, (total + acc) / (others + 1), KEY, expected, left)
    wire, rest = torch.empty(size, dtype=torch.uint8), torch.ones(count)
    with on_threads(num_threads):  # the mean in the gradient's memory
        found = coding.encode_mean_(codec, values, wires, KEY, wire, grad, rest, grad=grad)
    assert found == (True, first_bad)
    assert first_bad == (None if bad is None else 66_000)
    assert torch.equal(wire, expected)
    assert torch.equal(rest, (others + 1) * left)
    assert torch.equal(grad, codec.decode(wire, count, torch.float32))
    assert torch.equal(values, acc)


def test_a_mean_that_is_not_finite_is_found() -> None:
    wires = torch.stack([Half().encode(torch.full((5000,), 65504.0), KEY)] * 2)
    assert coding.decode_mean_(Half(), wires, torch.empty(5000), 2)
    wires[1].view(torch.float16)[4321] = math.inf
    assert not coding.decode_mean_(Half(), wires, torch.empty(5000), 2)
