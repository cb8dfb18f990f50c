"""Choices within chunks, values in two bits, a residual that decays: SparseLoCo's parts; and estimates in its place."""

import math

import micro
from micro.codecs.two_means import TwoMeans
from micro.codecs.two_means_published import PublishedTwoMeans
from micro.exchanges.gather_senders import GatherBySenders
from micro.selectors.chunks import Chunks
from tests.sparsifiers.base import (
    BUILD_UP,
    EXACT,
    Row,
    agreed_counts,
    lists,
    no_bytes,
    raw_lists,
    rows,
    sparse,
    union_values,
)
from tests.sparsifiers.index_codecs import elias_fano, whole
from tests.sparsifiers.quantisers import averaged, encoded_lists

GATHER, CHUNKS, DECAY = micro.Gather(), Chunks(size=48), micro.ErrorFeedback(decay=0.95)


def two_bits(count: int) -> int:
    """Bytes of two bits each, and of two magnitudes for each block."""
    return math.ceil(count / 4) + 8 * math.ceil(count / 1024)


def a_byte_each(count: int) -> int:
    """Bytes of the codes as the public code sends them, and of a table of four levels."""
    return count + 16 if count else 0


ROWS: tuple[Row, ...] = (
    Row(
        name="chunks+union",
        make=sparse(CHUNKS),
        band=BUILD_UP,
        counts=no_bytes,
        indices=lists(4),
        values=union_values,
        num_collectives=2,
    ),
    Row(
        name="micro+agreed+decay",
        make=sparse(micro.Micro(), feedback=DECAY),
        band=EXACT,
        counts=agreed_counts,
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        rule="agreed",
    ),
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
    Row(
        name="sparseloco",
        make=sparse(CHUNKS, exchange=GATHER, codec=TwoMeans(), indices=micro.Packed(), feedback=DECAY),
        band=BUILD_UP,
        counts=rows(8),
        indices=whole(elias_fano),
        values=encoded_lists(two_bits),
        num_collectives=3,
        rule="repaired",
        updates_all=False,
    ),
    Row(
        name="sparseloco+published",
        make=sparse(
            CHUNKS, exchange=GatherBySenders(), codec=PublishedTwoMeans(), indices=micro.Packed(), feedback=DECAY
        ),
        band=BUILD_UP,
        counts=rows(8),
        indices=whole(elias_fano),
        values=encoded_lists(a_byte_each),
        num_collectives=3,
        conserves_mass=False,
        rule="senders+published",
        updates_all=False,
    ),
)
