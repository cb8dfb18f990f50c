"""Codes of few bits: for all values, with and without error feedback; the range-based float; SparseLoCo's two bits."""

from typing import Any

import micro
from micro.codecs.int8 import Int8
from micro.codecs.qsgd import QSGD
from micro.codecs.sign import Sign
from micro.codecs.two_means import TwoMeans
from micro.selectors.everything import Everything
from micro.zoo.natural import Natural
from micro.zoo.onebit import OneBit
from micro.zoo.range_float import RangeFloat
from micro.zoo.terngrad import TernGrad
from tests.sparsifiers.base import ALONE, BUILD_UP, EXACT, GATHER, Row, sparse, whole

SOME = {"updated": "some"}


def averaged(name: str, codec: micro.Codec, *, seeded: bool = False) -> Row:
    """Return the row of a quantiser whose codes are added up by their owners and shared once more as codes."""
    return whole(f"{name}+union", Everything(), codec=codec, promises=SOME | {"seeded": seeded})


def to_all(name: str, codec: micro.Codec, *, is_random: bool = False) -> Row:
    """Return the row of a quantiser whose codes go to all, as published; random ones go without feedback."""
    promises = SOME | {"seeded": is_random, "conserves_mass": not is_random}
    feedback = ALONE if is_random else micro.ErrorFeedback()
    return whole(f"{name}+gather", Everything(), codec=codec, exchange=GATHER, feedback=feedback, promises=promises)


def sparseloco(name: str, exchange: micro.Exchange, codec: TwoMeans, **promises: Any) -> Row:
    """Return the row of SparseLoCo's parts."""
    return sparse(
        name,
        micro.TopK(scope="chunk", size=48),
        BUILD_UP,
        exchange=exchange,
        codec=codec,
        indices=micro.Packed(),
        feedback=micro.ErrorFeedback(decay=0.95),
        promises=SOME | promises,
    )


ROWS: tuple[Row, ...] = (
    averaged("fp16", micro.Half()),
    averaged("bf16", micro.BFloat16()),
    averaged("int8", Int8()),
    averaged("qsgd", QSGD(), seeded=True),
    averaged("terngrad", TernGrad(), seeded=True),
    averaged("natural", Natural()),
    averaged("signsgd", Sign()),
    averaged("onebit", OneBit()),
    averaged("two_means", TwoMeans()),
    to_all("signsgd", Sign()),
    to_all("onebit", OneBit()),
    to_all("qsgd+published", QSGD(rule="published"), is_random=True),
    to_all("terngrad+published", TernGrad(rule="published", clip=None), is_random=True),
    to_all("natural+published", Natural(rule="published"), is_random=True),
    sparse("topk+union+range_float", micro.TopK(), BUILD_UP, codec=RangeFloat(), promises=SOME),
    sparse(
        "topk+gather+range_float", micro.TopK(), BUILD_UP, codec=RangeFloat(bits=10), exchange=GATHER, promises=SOME
    ),
    sparse("micro+agreed+range_float", micro.Micro(), EXACT, codec=RangeFloat(), promises=SOME),
    sparseloco("sparseloco", GATHER, TwoMeans()),
    sparseloco("sparseloco+published", micro.Gather(rule="senders"), TwoMeans(rule="published"), conserves_mass=False),
)
