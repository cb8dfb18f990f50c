"""Thresholds that each rank estimates by itself: from fitted laws, samples, a bisection, or the step before."""

from typing import Any

import micro
from micro.exchanges.oktopk import Oktopk
from tests.sparsifiers.base import ABOUT, BUILD_UP, EXACT, GATHER, Band, Row, sparse

NEAR = Band(0.5, lambda world_size: 4 / 3 * world_size)  # per rank, and ranks may all choose alike, or all differ
CUT = Band(0.8, lambda world_size: world_size)
BISECTED = Band(1.0, lambda world_size: 2 * world_size)
MOMENTUM = micro.MomentumCorrection()


def estimated(name: str, fit: str, band: Band | None, *, exchange: micro.Exchange | None = GATHER, **more: Any) -> Row:
    """Return the row of a fit with its settings; no exchange stands for the union."""
    parts = {key: more.pop(key) for key in ("feedback", "promises") if key in more}
    selector = micro.Estimated(fit={"name": fit, **more})
    return sparse(name, selector, band, exchange=exchange or micro.Union(), **parts)


ROWS: tuple[Row, ...] = (
    estimated("gaussiank+repaired", "gaussiank", NEAR),
    estimated("gaussiank+repaired+union", "gaussiank", NEAR, exchange=None),
    estimated("gaussiank+published", "gaussiank_published", None),
    estimated(
        "gaussiank+published+slices",
        "gaussiank_published",
        None,
        exchange=micro.Gather(rule="published"),
        promises={"conserves_mass": False},
    ),
    estimated("sidco+e+repaired", "sidco", NEAR),
    estimated("sidco+gp+repaired", "sidco", NEAR, law="gamma"),
    estimated("sidco+p+repaired", "sidco", NEAR, law="pareto", stages=3),
    estimated("sidco+e+published", "sidco_published", None),
    estimated("sidco+gp+published", "sidco_published", None, law="gamma"),
    estimated("sidco+p+published", "sidco_published", None, law="pareto", stages=2),
    estimated("dgc+repaired", "dgc", NEAR, feedback=MOMENTUM),
    estimated("dgc+repaired+union", "dgc", NEAR, exchange=None, feedback=MOMENTUM),
    estimated("dgc+published", "dgc_published", CUT, feedback=MOMENTUM),
    estimated("sage+repaired", "sage", NEAR, exchange=None),
    estimated("sage+published", "sage_published", None, exchange=None),
    estimated("redsync+repaired", "redsync", BISECTED),
    estimated("redsync+published", "redsync_published", None),
    estimated("reused+union", "reused", BUILD_UP, exchange=None),
    estimated("oktopk", "reused", EXACT, exchange=Oktopk(), promises=ABOUT),
    estimated(
        "oktopk+published", "reused_published", None, exchange=Oktopk(rule="published", balance=None), promises=ABOUT
    ),
    sparse("topk+oktopk", micro.TopK(), EXACT, exchange=Oktopk(), promises=ABOUT),
)
