"""Choices within chunks, values in two bits, a residual that decays: SparseLoCo's parts; and estimates in its place."""

import math
from dataclasses import replace

import micro
from micro.codecs.two_means import TwoMeans
from tests.sparsifiers.base import (
    BUILD_UP,
    Row,
    lists,
    raw_lists,
    rows,
    sparse,
)
from tests.sparsifiers.core import MICRO_AGREED, TOPK_UNION
from tests.sparsifiers.index_codecs import elias_fano, whole
from tests.sparsifiers.quantisers import averaged, encoded_lists

GATHER, CHUNKS, DECAY = micro.Gather(), micro.TopK(scope="chunk", size=48), micro.ErrorFeedback(decay=0.95)


def two_bits(count: int) -> int:
    """Bytes of two bits each, and of two magnitudes for each block."""
    return math.ceil(count / 4) + 8 * math.ceil(count / 1024)


def a_byte_each(count: int) -> int:
    """Bytes of the codes as the public code sends them, and of a table of four levels."""
    return count + 16 if count else 0


SPARSELOCO = Row(
    name="sparseloco",
    make=sparse(CHUNKS, exchange=GATHER, codec=TwoMeans(), indices=micro.Packed(), feedback=DECAY),
    band=BUILD_UP,
    counts=rows(8),
    indices=whole(elias_fano),
    values=encoded_lists(two_bits),
    num_collectives=3,
    rule="repaired",
    updates_all=False,
)
ROWS: tuple[Row, ...] = (
    replace(TOPK_UNION, name="chunks+union", make=sparse(CHUNKS)),
    replace(MICRO_AGREED, name="micro+agreed+decay", make=sparse(micro.Micro(), feedback=DECAY)),
    Row(
        name="topk+gather+ef21",
        make=sparse(micro.TopK(), exchange=GATHER, feedback=micro.EF21(smoothing=0.5)),
        band=BUILD_UP,
        counts=rows(8),
        indices=lists(4),
        values=raw_lists,
        num_collectives=3,
        conserves_mass=False,
        spectral=True,  # the update is dense
    ),
    averaged("two_means", TwoMeans(), two_bits, rule="repaired"),
    SPARSELOCO,
    replace(
        SPARSELOCO,
        name="sparseloco+published",
        make=sparse(
            CHUNKS,
            exchange=micro.Gather(rule="senders"),
            codec=TwoMeans(rule="published"),
            indices=micro.Packed(),
            feedback=DECAY,
        ),
        values=encoded_lists(a_byte_each),
        conserves_mass=False,
        rule="senders+published",
    ),
)
