"""Methods whose ranks guess their own threshold from samples or by bisection: DGC, SAGE, RedSync.

At the size of the laws' vector a sample may be all of it, so these rows need not depend on the seed there.
"""

from typing import Any

import micro
from tests.sparsifiers.base import Band, Row, lists, raw_lists, rows, sparse, union_values

GATHER, MOMENTUM = micro.Gather(), micro.MomentumCorrection()

OWN: dict[str, Any] = {"indices": lists(4), "num_collectives": 3, "own_thresholds": True}
GATHERED: dict[str, Any] = {"counts": rows(8), "values": raw_lists} | OWN
UNITED: dict[str, Any] = {"counts": rows(4), "values": union_values} | OWN

FITTED = Band(0.5, lambda world_size: 4 / 3 * world_size)
CUT = Band(0.8, lambda world_size: world_size)
BISECTED = Band(1.0, lambda world_size: 2 * world_size)

ROWS: tuple[Row, ...] = (
    Row(
        name="dgc+repaired",
        make=sparse(micro.Estimated(fit="dgc"), exchange=GATHER, feedback=MOMENTUM),
        band=FITTED,
        rule="repaired",
        **GATHERED,
    ),
    Row(
        name="dgc+repaired+union",
        make=sparse(micro.Estimated(fit="dgc"), feedback=MOMENTUM),
        band=FITTED,
        rule="repaired",
        **UNITED,
    ),
    Row(
        name="dgc+published",
        make=sparse(micro.Estimated(fit="dgc_published"), exchange=GATHER, feedback=MOMENTUM),
        band=CUT,
        rule="published",
        **GATHERED,
    ),
    Row(name="sage+repaired", make=sparse(micro.Estimated(fit="sage")), band=FITTED, rule="repaired", **UNITED),
    Row(
        name="sage+published", make=sparse(micro.Estimated(fit="sage_published")), band=None, rule="published", **UNITED
    ),
    Row(
        name="redsync+repaired",
        make=sparse(micro.Estimated(fit="redsync"), exchange=GATHER),
        band=BISECTED,
        rule="repaired",
        **GATHERED,
    ),
    Row(
        name="redsync+published",
        make=sparse(micro.Estimated(fit="redsync_published"), exchange=GATHER),
        band=None,
        rule="published",
        **GATHERED,
    ),
)
