"""Packed codes and index codecs against brute force over bits."""

import math
import random

import pytest
import torch

import micro
from micro.codecs.bits import num_packed_bytes, pack, unpack
from micro.codecs.indices import Bitmap, IndexCodec, Int32, Packed, Shortest
from tests.drawn_indices import draw
from tests.products import grid

CODECS = [Int32(), Bitmap(), Packed(), Shortest()]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
ENTROPY_GAP = 0.6  # bits an index above the entropy of a random set


def bits_of(data: torch.Tensor) -> list[int]:
    return [byte >> place & 1 for byte in data.tolist() for place in range(8)]


@grid(width=range(1, 33), count=[0, 1, 7, 8, 9, 41])
def test_codes_lie_side_by_side_lowest_bit_first(width: int, count: int) -> None:
    randomness = random.Random(width * 100 + count)
    codes = [randomness.getrandbits(width) for _ in range(count)]
    if count > 1:
        codes[:2] = [0, 2**width - 1]
    packed = pack(torch.tensor(codes, dtype=torch.int64), width)
    assert packed.dtype == torch.uint8
    assert packed.numel() == num_packed_bytes(count, width) == math.ceil(count * width / 8)
    expected = [code >> place & 1 for code in codes for place in range(width)]
    assert bits_of(packed)[: count * width] == expected
    assert not any(bits_of(packed)[count * width :])
    assert unpack(packed, count, width).tolist() == codes


@pytest.mark.parametrize("width", [0, 33])
def test_codes_have_one_to_32_bits(width: int) -> None:
    with pytest.raises(ValueError, match=f"in 1 to 32 bits, got {width}"):
        pack(torch.zeros(1, dtype=torch.int64), width)


@every_codec
@pytest.mark.parametrize(
    ("count", "span"),
    [(0, 0), (0, 9), (1, 1), (1, 2**31 - 1), (5, 5), (7, 8), (3, 1000), (64, 4096), (100, 333), (999, 1000)],
)
def test_indices_come_back_from_exactly_the_bytes_that_were_told(codec: IndexCodec, count: int, span: int) -> None:
    if span > 10**6 and codec.name == "bitmap":
        pytest.skip("256 MiB of bits")
    indices = torch.tensor(draw(count, span), dtype=torch.int32)
    wire = codec.encode(indices, span)
    assert wire.dtype == torch.uint8
    assert wire.numel() == codec.num_bytes(count, span)
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), wire])  # as it lies in a longer message
    found = codec.decode(message[3:], count, span)
    assert found.dtype == torch.int32
    assert torch.equal(found, indices)


@every_codec
@pytest.mark.parametrize("counts", [(4, 0, 9, 1), (0, 0), (3,), (0, 50, 50)])
def test_lists_that_follow_each_other_come_back_as_one(codec: IndexCodec, counts: tuple[int, ...]) -> None:
    spans = [(60 * place, 60 * place + 50 + place) for place in range(len(counts))]
    lists = [draw(count, stop - start, count) for count, (start, stop) in zip(counts, spans, strict=True)]
    wires = [
        codec.encode(torch.tensor(found, dtype=torch.int32), stop - start)
        for found, (start, stop) in zip(lists, spans, strict=True)
    ]
    joined = codec.decode_joined(torch.cat(wires), counts, spans)
    assert joined.dtype == torch.int32
    assert joined.tolist() == [start + i for found, (start, _) in zip(lists, spans, strict=True) for i in found]


@pytest.mark.parametrize("density", [0.5, 0.25, 0.1, 0.03, 0.01, 0.001, 0.0001])
def test_packed_indices_take_the_logarithm_of_the_density_and_two_bits(density: float) -> None:
    span = 10_000_000
    count = int(density * span)
    bits = 8 * Packed().num_bytes(count, span) / count
    assert bits <= math.log2(1 / density) + 2 + 16 / count
    entropy = (-density * math.log2(density) - (1 - density) * math.log2(1 - density)) / density
    assert entropy <= bits <= entropy + ENTROPY_GAP + 0.5 * (density > 0.2)


@pytest.mark.parametrize("count", [1, 10, 100, 250, 300, 500, 900, 1000])
def test_the_shortest_is_the_shortest(count: int) -> None:
    span = 1000
    lengths = {codec.name: codec.num_bytes(count, span) for codec in CODECS}
    assert lengths["shortest"] == min(lengths.values())
    assert (lengths["bitmap"] == lengths["shortest"]) == (count >= 250)


def test_index_codecs_are_found_by_name() -> None:
    assert set(micro.known(micro.IndexCodec)) == {"int32", "bitmap", "packed", "shortest"}
    assert micro.build(micro.IndexCodec, "packed") == Packed()


@every_codec
@pytest.mark.parametrize("span", [1, 7, 100, 1000, 5000])
def test_no_shorter_list_takes_more_than_is_said(codec: IndexCodec, span: int) -> None:
    longest = 0
    for count in range(span + 1):
        longest = max(longest, codec.num_bytes(count, span))
        assert longest <= codec.most_bytes(count, span)
        assert codec.most_bytes(count, span) <= codec.num_bytes(count, span) + 1 + (count == 0) * span
