"""The quantisers' kernels against the codecs in torch, bit for bit."""

from collections.abc import Callable

import torch
from torch import Tensor

from micro.codecs.fused import FusedCodec
from micro.codecs.half import BFloat16, Half
from micro.codecs.int8 import Int8
from micro.codecs.natural import Natural
from micro.codecs.natural_published import PublishedNatural
from micro.codecs.onebit import OneBit
from micro.codecs.qsgd import QSGD
from micro.codecs.qsgd_published import PublishedQSGD
from micro.codecs.sign import Sign
from micro.codecs.terngrad import TernGrad
from micro.codecs.terngrad_published import PublishedTernGrad
from micro.randomness import generator, words

KEY = (7, 3, 1, 0)
SMALL, LARGE = 1e-40, 3.4e38
Encode = Callable[[Tensor], Tensor]
Decode = Callable[[Tensor, int], Tensor]


def pairs(name: str, numel: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the message that the kernels make and the codec's, and what both decode it to, where a kernel does."""
    codec, encode, decode = _codes()[name]
    values = torch.randn(numel, generator=generator(0, numel))
    values[::11] = 0.0
    values[1024:2048] = 0.0
    values[2050:2054] = torch.tensor([SMALL, -LARGE, 65_519.0, 65_536.0])[: max(numel - 2050, 0)]
    wire = codec.encode_in_torch(values.clone(), KEY)
    made = [(encode(values.to(device)).cpu(), wire)]
    if decode is None:
        return made
    return [*made, (decode(wire.to(device), numel).cpu(), codec.decode_in_torch(wire, numel, torch.float32))]


def names() -> list[str]:
    """Return the names of all codes."""
    return list(_codes())


def _codes() -> dict[str, tuple[FusedCodec, Encode, Decode | None]]:
    from micro.kernels.triton import casting, decoding, encoding

    drawn = words(*KEY)

    def levels(bits: int, *, is_least_squares: bool) -> tuple[Encode, Decode]:
        return (
            lambda x: encoding.encode_levels(x, drawn, block=512, bits=bits, is_least_squares=is_least_squares),
            lambda wire, count: decoding.decode_levels(wire, count, block=512, bits=bits),
        )

    def ternary(*, is_least_squares: bool) -> tuple[Encode, Decode]:
        return (
            lambda x: encoding.encode_ternary(x, drawn, block=1024, clip=2.5, is_least_squares=is_least_squares),
            lambda wire, count: decoding.decode_ternary(wire, count, block=1024),
        )

    def int8(*, is_random: bool) -> tuple[Encode, Decode]:
        return (
            lambda x: encoding.encode_int8(x, drawn if is_random else None, block=256),
            lambda wire, count: decoding.decode_int8(wire, count, block=256),
        )

    def signs(*, has_two: bool) -> tuple[Encode, Decode]:
        return (
            lambda x: encoding.encode_signs(x, block=1024, has_two=has_two),
            lambda wire, count: decoding.decode_signs(wire, count, block=1024, has_two=has_two),
        )

    return {
        "half": (Half(), lambda x: casting.encode_cast(x, is_half=True), None),
        "bfloat16": (BFloat16(), lambda x: casting.encode_cast(x, is_half=False), None),
        "natural": (Natural(), lambda x: casting.encode_natural(x, None), None),
        "natural, published": (PublishedNatural(), lambda x: casting.encode_natural(x, drawn), None),
        "int8": (Int8(), *int8(is_random=False)),
        "int8, stochastic": (Int8(stochastic=True), *int8(is_random=True)),
        "qsgd, 2 bits": (QSGD(bits=2), *levels(2, is_least_squares=True)),
        "qsgd, 4 bits": (QSGD(bits=4), *levels(4, is_least_squares=True)),
        "qsgd, 8 bits": (QSGD(bits=8), *levels(8, is_least_squares=True)),
        "qsgd, published": (PublishedQSGD(), *levels(4, is_least_squares=False)),
        "terngrad": (TernGrad(), *ternary(is_least_squares=True)),
        "terngrad, published": (PublishedTernGrad(), *ternary(is_least_squares=False)),
        "sign": (Sign(), *signs(has_two=False)),
        "onebit": (OneBit(), *signs(has_two=True)),
    }
