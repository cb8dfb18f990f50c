"""Methods at a density of 1: every value travels as it is, in one all-reduce."""

import micro
from tests.sparsifiers.base import EXACT, Make, Row, no_bytes, union_values


def at_one(selector: micro.Selector, **parts: object) -> Make:
    """Return a maker of these parts at a density of 1."""
    return lambda _density, seed: micro.SparseReducer(selector, 1.0, seed=seed, **parts)  # type: ignore[arg-type]


ROWS: tuple[Row, ...] = (
    Row(
        name="micro+at one",
        make=at_one(micro.Micro()),
        band=EXACT,
        counts=no_bytes,
        indices=no_bytes,
        values=union_values,
        num_collectives=1,
        follows_density=False,
        rule="agreed",
    ),
    Row(
        name="topk+gather+momentum+at one",
        make=at_one(micro.TopK(), exchange=micro.Gather(), feedback=micro.MomentumCorrection()),
        band=EXACT,
        counts=no_bytes,
        indices=no_bytes,
        values=union_values,
        num_collectives=1,
        follows_density=False,
    ),
    Row(
        name="topk+no feedback+at one",
        make=at_one(micro.TopK(), feedback=micro.NoFeedback()),
        band=EXACT,
        counts=no_bytes,
        indices=no_bytes,
        values=union_values,
        num_collectives=1,
        conserves_mass=False,
        follows_density=False,
    ),
)
