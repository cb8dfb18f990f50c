"""Codes of few bits for all values: quantisers with and without error feedback; and the range-based float."""

import math
from collections.abc import Callable

import micro
from micro.codecs.int8 import Int8
from micro.codecs.qsgd import QSGD
from micro.codecs.sign import Sign
from micro.selectors.everything import Everything
from micro.zoo.natural import Natural
from micro.zoo.onebit import OneBit
from micro.zoo.range_float import RangeFloat
from micro.zoo.terngrad import TernGrad
from tests.sparsifiers.base import (
    BUILD_UP,
    EXACT,
    Bytes,
    Make,
    Outcome,
    Row,
    agreed_counts,
    encoded_values,
    gathered,
    lists,
    no_bytes,
    rows,
    sparse,
)

Size = Callable[[int], int]  # count -> bytes
GATHER, ALONE = micro.Gather(), micro.NoFeedback()


def coded(bits: float, *, block: int | None = None, header: int = 4) -> Size:
    """Bytes of codes of so many bits, and of a header for each block, or for the message."""

    def size(count: int) -> int:
        num_headers = math.ceil(count / block) if block else min(count, 1)
        return math.ceil(count * bits / 8) + header * num_headers

    return size


def ternary(count: int) -> int:
    """Bytes of five codes each, and four for every block."""
    return math.ceil(count / 5) + 4 * math.ceil(count / 1024)


def encoded_lists(size: Size) -> Bytes:
    """Each rank's own codes, to every other rank."""

    def sent(outcome: Outcome, rank: int) -> float:
        return gathered([size(count) for count in outcome.counts], rank)

    return sent


def all_of_it(**parts: object) -> Make:
    """Return a maker of a reducer that sends every value, whatever density it is given."""
    make = sparse(Everything(), **parts)
    return lambda _density, seed: make(1.0, seed)


def averaged(name: str, codec: micro.Codec, size: Size, **promises: bool | str) -> Row:
    """Return the row of a quantiser whose codes are added up by their owners and shared once more as codes."""
    return Row(
        name=f"{name}+union",
        make=all_of_it(codec=codec),
        band=EXACT,
        counts=no_bytes,
        indices=no_bytes,
        values=encoded_values(size),
        num_collectives=2,
        follows_density=False,
        updates_all=False,
        **promises,  # type: ignore[arg-type]
    )


def to_all(name: str, codec: micro.Codec, size: Size, *, feedback: bool = True, **promises: bool | str) -> Row:
    """Return the row of a quantiser, as published: every rank's codes go to all others."""
    return Row(
        name=f"{name}+gather",
        make=all_of_it(codec=codec, exchange=GATHER, feedback=micro.ErrorFeedback() if feedback else ALONE),
        band=EXACT,
        counts=rows(8),
        indices=no_bytes,
        values=encoded_lists(size),
        num_collectives=2,
        follows_density=False,
        updates_all=False,
        conserves_mass=feedback,
        **promises,  # type: ignore[arg-type]
    )


ROWS: tuple[Row, ...] = (
    averaged("fp16", micro.Half(), coded(16, header=0)),
    averaged("bf16", micro.BFloat16(), coded(16, header=0)),
    averaged("int8", Int8(), coded(8, block=256)),
    averaged("qsgd", QSGD(), coded(4, block=512), seeded=True, rule="repaired"),
    averaged("terngrad", TernGrad(), ternary, seeded=True, rule="repaired"),
    averaged("natural", Natural(), coded(8), rule="repaired"),
    averaged("signsgd", Sign(), coded(1, block=1024)),
    averaged("onebit", OneBit(), coded(1, block=1024, header=8)),
    to_all("signsgd", Sign(), coded(1, block=1024)),
    to_all("onebit", OneBit(), coded(1, block=1024, header=8)),
    to_all(
        "qsgd+published",
        QSGD(rule="published"),
        coded(4, block=512),
        feedback=False,
        seeded=True,
        rule="published",
    ),
    to_all(
        "terngrad+published",
        TernGrad(rule="published", clip=None),
        ternary,
        feedback=False,
        seeded=True,
        rule="published",
    ),
    to_all("natural+published", Natural(rule="published"), coded(8), feedback=False, seeded=True, rule="published"),
    Row(
        name="topk+union+range_float",
        make=sparse(micro.TopK(), codec=RangeFloat()),
        band=BUILD_UP,
        counts=no_bytes,
        indices=lists(4),
        values=encoded_values(coded(8)),
        num_collectives=3,
        updates_all=False,
    ),
    Row(
        name="topk+gather+range_float",
        make=sparse(micro.TopK(), codec=RangeFloat(bits=10), exchange=GATHER),
        band=BUILD_UP,
        counts=rows(8),
        indices=lists(4),
        values=encoded_lists(coded(10)),
        num_collectives=3,
        updates_all=False,
    ),
    Row(
        name="micro+agreed+range_float",
        make=sparse(micro.Micro(), codec=RangeFloat()),
        band=EXACT,
        counts=agreed_counts,
        indices=lists(4),
        values=encoded_values(coded(8)),
        num_collectives=4,
        rule="agreed",
        updates_all=False,
    ),
)
