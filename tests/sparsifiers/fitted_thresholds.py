"""Thresholds from fitted laws: Gaussian-k and SIDCo."""

import micro
from micro.parts import Rule
from micro.selectors.fits.laws import Law
from tests.sparsifiers.base import Band, Row, lists, raw_lists, rows, sparse, union_values

GATHER = micro.Gather()
BOUNDED = Band(0.5, lambda world_size: 4 / 3 * world_size)  # per rank, and ranks may all choose alike, or all differ


def gathered(name: str, selector: micro.Selector, rule: str, exchange: micro.Gather = GATHER) -> Row:
    """Row of a selector that knows nothing of other ranks, with the exchange of its source."""
    return Row(
        name=name,
        make=sparse(selector, exchange=exchange),
        band=BOUNDED if rule == "repaired" else None,
        counts=rows(8),
        indices=lists(4),
        values=raw_lists,
        num_collectives=3,
        conserves_mass=exchange.rule_name is None,
        own_thresholds=True,
        rule=rule,
    )


def sidco(name: str, law: Law, rule: Rule, stages: int | None = None) -> Row:
    """Row of SIDCo with one law."""
    word = "sidco" if rule == "repaired" else "sidco_published"
    return gathered(name, micro.Estimated(fit={"name": word, "law": law, "stages": stages}), rule)


ROWS: tuple[Row, ...] = (
    gathered("gaussiank+repaired", micro.Estimated(fit="gaussiank"), "repaired"),
    gathered("gaussiank+published", micro.Estimated(fit="gaussiank_published"), "published"),
    gathered(
        "gaussiank+published+slices",
        micro.Estimated(fit="gaussiank_published"),
        "published",
        micro.Gather(rule="published"),
    ),
    Row(
        name="gaussiank+repaired+union",
        make=sparse(micro.Estimated(fit="gaussiank")),
        band=BOUNDED,
        counts=rows(4),
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        own_thresholds=True,
        rule="repaired",
    ),
    sidco("sidco+e+repaired", "exponential", "repaired"),
    sidco("sidco+gp+repaired", "gamma", "repaired"),
    sidco("sidco+p+repaired", "pareto", "repaired", stages=3),
    sidco("sidco+e+published", "exponential", "published"),
    sidco("sidco+gp+published", "gamma", "published"),
    sidco("sidco+p+published", "pareto", "published", stages=2),
)
