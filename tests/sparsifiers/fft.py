"""FFT sparsification, as published and with a residual."""

import math

import micro
from micro.zoo.fft import FFTReducer
from tests.sparsifiers.base import BUILD_UP, Make, Outcome, Row, no_bytes

NUM_SPECTRUM_BINS = 136  # of the laws' 257 elements, padded to 270


def bitmap(outcome: Outcome, rank: int) -> float:
    """A bit for each bin, to every other rank."""
    return math.ceil(NUM_SPECTRUM_BINS / 8) * (outcome.world_size - 1)


def ten_bits(outcome: Outcome, rank: int) -> float:
    """Two parts of ten bits for each bin, the quantiser's header and the finite flag, to every other rank."""
    return (math.ceil(20 * outcome.counts[rank] / 8) + 4 + 1) * (outcome.world_size - 1)


def raw_parts(outcome: Outcome, rank: int) -> float:
    """Two parts at full length for each bin, and the finite flag, to every other rank."""
    return (2 * outcome.value_bytes * outcome.counts[rank] + 1) * (outcome.world_size - 1)


def fft(feedback: micro.Feedback, bits: int = 10) -> Make:
    """Return a maker of the FFT reducer."""
    return lambda density, seed: FFTReducer(density=density, bits=bits, feedback=feedback, seed=seed)


ROWS: tuple[Row, ...] = (
    Row(
        name="fft",
        make=fft(micro.NoFeedback()),
        band=BUILD_UP,
        counts=no_bytes,
        indices=bitmap,
        values=ten_bits,
        num_collectives=2,
        conserves_mass=False,
        spectral=True,
        mixes=True,
    ),
    Row(
        name="fft+residual",
        make=fft(micro.ErrorFeedback()),
        band=BUILD_UP,
        counts=no_bytes,
        indices=bitmap,
        values=ten_bits,
        num_collectives=2,
        spectral=True,
        mixes=True,
    ),
    Row(
        name="fft+residual+raw",
        make=fft(micro.ErrorFeedback(), bits=32),
        band=BUILD_UP,
        counts=no_bytes,
        indices=bitmap,
        values=raw_parts,
        num_collectives=2,
        spectral=True,
        mixes=True,
    ),
)
