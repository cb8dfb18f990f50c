"""Ok-Topk: reused thresholds, sums in regions. What each region holds is not in the outcome: bytes are bounds here."""

from micro.exchanges.oktopk import Oktopk
from micro.selectors.estimated import Estimated
from micro.selectors.topk import TopK
from tests.sparsifiers.base import BUILD_UP, EXACT, Bytes, Outcome, Row, lists, rows, sparse, union_values


def entries(element_bytes: int | None) -> Bytes:
    """The own choice to the regions, and all of the update, if one rank holds it, spread and then to all."""

    def sent(outcome: Outcome, rank: int) -> float:
        n, size = outcome.world_size, element_bytes or outcome.value_bytes
        return (n > 1) * size * (outcome.counts[rank] + outcome.num_updated * n)

    return sent


def control(row_bytes: int, index_bytes: int) -> Bytes:
    """Sizes, a row, the boundaries of a repartition; and every sum there can be, with or without its index."""

    def sent(outcome: Outcome, rank: int) -> float:
        n, sums = outcome.world_size, sum(outcome.counts)
        return (n - 1) * (4 + row_bytes + 16 * (n - 1) / n + (outcome.value_bytes + index_bytes) * sums)

    return sent


ROWS: tuple[Row, ...] = (
    Row(
        name="oktopk",
        make=sparse(Estimated(fit="reused"), exchange=Oktopk()),
        band=EXACT,
        counts=control(136, 0),
        indices=entries(4),
        values=entries(None),
        num_collectives=6,
        rule="repaired",
        own_thresholds=True,
        upper_bounds=True,
    ),
    Row(
        name="oktopk+published",
        make=sparse(Estimated(fit="reused_published"), exchange=Oktopk(rule="published", balance=None)),
        band=None,
        counts=control(12, 4),
        indices=entries(4),
        values=entries(None),
        num_collectives=5,
        rule="published",
        own_thresholds=True,
        upper_bounds=True,
    ),
    Row(
        name="topk+oktopk",
        make=sparse(TopK(), exchange=Oktopk()),
        band=EXACT,
        counts=control(136, 0),
        indices=entries(4),
        values=entries(None),
        num_collectives=6,
        rule="repaired",
        upper_bounds=True,
    ),
    Row(
        name="reused+union",
        make=sparse(Estimated(fit="reused")),
        band=BUILD_UP,
        counts=rows(4),
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        rule="repaired",
        own_thresholds=True,
    ),
)
