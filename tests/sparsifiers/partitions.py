"""Methods that share out the vector unequally: ExDyna and DEFT."""

from micro.zoo.deft import Deft
from micro.zoo.exdyna import ExDyna
from tests.sparsifiers.base import EXACT, Outcome, Row, agreed_counts, all_reduce, lists, rows, sparse, union_values

LAYERS = (128, 8, 121)  # lengths in the layout of the laws


def num_pieces(world_size: int) -> int:
    """Layers, each cut by the number of ranks where it is longer than a rank's share."""
    return sum(world_size if size > sum(LAYERS) / world_size else 1 for size in LAYERS)


def norms(outcome: Outcome, rank: int) -> float:
    """All-reduce of one float64 per piece."""
    return all_reduce(8 * num_pieces(outcome.world_size), outcome.world_size)


def plan(outcome: Outcome, rank: int) -> float:
    """Broadcast of the bins' lengths and of every piece's number, as a mean over the ranks; then every rank's count."""
    n = outcome.world_size
    return 4 * (n + num_pieces(n)) * (n - 1) / n + rows(4)(outcome, rank)


ROWS: tuple[Row, ...] = (
    Row(
        name="exdyna+repaired",
        make=sparse(ExDyna()),
        band=EXACT,
        counts=agreed_counts,
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        rule="repaired",
    ),
    Row(
        name="exdyna+published",
        make=sparse(ExDyna(rule="published")),
        band=None,
        counts=rows(4),
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        rule="published",
    ),
    Row(
        name="deft+repaired",
        make=sparse(Deft()),
        band=EXACT,
        counts=norms,
        indices=lists(4),
        values=union_values,
        num_collectives=3,
        rule="repaired",
    ),
    Row(
        name="deft+published",
        make=sparse(Deft(rule="published")),
        band=None,
        counts=plan,
        indices=lists(4),
        values=union_values,
        num_collectives=4,
        rule="published",
    ),
)
