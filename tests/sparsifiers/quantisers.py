"""Codes of few bits: for all values, with and without error feedback; the range-based float; SparseLoCo's two bits."""

from typing import Any

import micro
from micro.codecs.fp8 import FP8
from micro.codecs.int8 import Int8
from micro.codecs.qsgd import QSGD
from micro.codecs.sign import Sign
from micro.codecs.two_means import TwoMeans
from micro.selectors.everything import Everything
from micro.zoo.range_float import RangeFloat
from micro.zoo.terngrad import TernGrad
from tests.sparsifiers.base import ALONE, BUILD_UP, EXACT, GATHER, LOSSY, Row, row, sparse, whole

SOME: dict[str, Any] = {"updated": "some"}
CHUNKS = micro.TopK(scope="chunk", size=48)
LOCO: dict[str, Any] = {"indices": micro.Packed(), "feedback": micro.ErrorFeedback(decay=0.95), **SOME}


def averaged(name: str, codec: micro.Codec, *, seeded: bool = False) -> Row:
    """Return the row of a quantiser whose codes are added up by their owners and shared once more as codes."""
    return whole(f"{name}+union", Everything(), codec=codec, seeded=seeded, **SOME)


def to_all(name: str, codec: micro.Codec, **given: Any) -> Row:
    """Return the row of a quantiser whose codes go to all, as published."""
    return whole(f"{name}+gather", Everything(), codec=codec, exchange=GATHER, **SOME, **given)


def quantized(name: str, codec: micro.Codec, *, to_all: bool = False, **promised: Any) -> Row:
    """Return the row of the reducer of all values."""
    return row(
        name, lambda _, seed: micro.Quantized(codec, to_all, seed=seed), EXACT, follows_density=False, **promised
    )


RANDOM: dict[str, Any] = {"feedback": ALONE, "seeded": True, **LOSSY}

ROWS: tuple[Row, ...] = (
    averaged("fp16", micro.Half()),
    averaged("bf16", micro.BFloat16()),
    averaged("int8", Int8()),
    averaged("fp8", FP8()),
    averaged("qsgd", QSGD(), seeded=True),
    averaged("terngrad", TernGrad(), seeded=True),
    averaged("signsgd", Sign()),
    averaged("two_means", TwoMeans()),
    quantized("quantized+raw", micro.build(micro.Codec, "raw")),
    quantized("quantized+int8", Int8(), **SOME),
    quantized("quantized+sign+to all", Sign(), to_all=True, **SOME),
    to_all("signsgd", Sign()),
    to_all("qsgd+published", QSGD(rule="published"), **RANDOM),
    to_all("terngrad+published", TernGrad(rule="published", clip=None), **RANDOM),
    sparse("topk+union+range_float", micro.TopK(), BUILD_UP, codec=RangeFloat(), **SOME),
    sparse("topk+gather+range_float", micro.TopK(), BUILD_UP, codec=RangeFloat(bits=10), exchange=GATHER, **SOME),
    sparse("micro+agreed+range_float", micro.Micro(), EXACT, codec=RangeFloat(), **SOME),
    sparse("sparseloco", CHUNKS, BUILD_UP, exchange=GATHER, codec=TwoMeans(), **LOCO),
    sparse(
        "sparseloco+published",
        CHUNKS,
        BUILD_UP,
        exchange=micro.Gather(rule="senders"),
        codec=TwoMeans(rule="published"),
        **LOCO,
        **LOSSY,
    ),
)
