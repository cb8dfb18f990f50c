"""Thresholds that each rank estimates by itself: from fitted laws, samples, or the step before."""

from typing import Any

import micro
from micro.exchanges.oktopk import Oktopk
from tests.sparsifiers.base import ABOUT, BUILD_UP, EXACT, GATHER, LOSSY, Band, Row, sparse

NEAR = Band(0.5, lambda world_size: 4 / 3 * world_size)  # per rank, and ranks may all choose alike, or all differ
CUT = Band(0.8, lambda world_size: world_size)
UNION, MOMENTUM = micro.Union(), micro.MomentumCorrection()


def estimated(name: str, fit: str | dict[str, Any], band: Band | None, **parts: Any) -> Row:
    """Return the row of a fit, with its settings; values are gathered unless another exchange is given."""
    return sparse(name, micro.Estimated(fit=fit), band, **{"exchange": GATHER, **parts})


def sidco(name: str, law: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "law": law, **settings}


ROWS: tuple[Row, ...] = (
    estimated("gaussiank+repaired", "gaussiank", NEAR),
    estimated("gaussiank+repaired+union", "gaussiank", NEAR, exchange=UNION),
    estimated("gaussiank+published", "gaussiank_published", None),
    estimated(
        "gaussiank+published+slices", "gaussiank_published", None, exchange=micro.Gather(rule="published"), **LOSSY
    ),
    estimated("sidco+e+repaired", "sidco", NEAR),
    estimated("sidco+gp+repaired", sidco("sidco", "gamma"), NEAR),
    estimated("sidco+p+repaired", sidco("sidco", "pareto", stages=3), NEAR),
    estimated("dgc+repaired", "dgc", NEAR, feedback=MOMENTUM),
    estimated("dgc+repaired+union", "dgc", NEAR, exchange=UNION, feedback=MOMENTUM),
    estimated("dgc+published", "dgc_published", CUT, feedback=MOMENTUM),
    estimated("reused+union", "reused", BUILD_UP, exchange=UNION),
    estimated("oktopk", "reused", EXACT, exchange=Oktopk(), **ABOUT),
    estimated("oktopk+published", "reused_published", None, exchange=Oktopk(rule="published", balance=None), **ABOUT),
    sparse("topk+oktopk", micro.TopK(), EXACT, exchange=Oktopk(), **ABOUT),
)
