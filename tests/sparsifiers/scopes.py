"""Methods within each tensor, in units of scales, in pieces, on some parameters, and between nodes of two ranks."""

from dataclasses import replace
from typing import Any

import micro
from micro.selectors.scaled_elements import ScaledElements
from tests.sparsifiers.base import BUILD_UP, EXACT, GATHER, Row, sparse

MICRO, TOPK = micro.SparseReducer(micro.Micro(), 0.05), micro.SparseReducer(micro.TopK(), 0.05, exchange=GATHER)
POWERSGD = micro.PowerSGD(rank=2, min_compression=1.5)
PIECE_MB = 1100 / 2**20  # one piece of the laws' 257 elements in single precision, two in double
UNSAID: dict[str, Any] = {"traffic_within": None, "num_collectives": 3}
BIAS: dict[str, Any] = {"dense": ("a.bias",), "names_rank": False}  # whose mean is the same on all ranks


def seeded(reducer: Any, density: micro.Density[Any] | float, seed: int) -> Any:
    """Return the reducer with this seed, and with this density where it has one."""
    given = {"density": density} if isinstance(reducer, micro.SparseReducer) else {}
    return replace(reducer, seed=seed, **given) if hasattr(reducer, "seed") else reducer


def split(name: str, reducer: micro.Reducer, *, which: Any = None, **promises: Any) -> Row:
    """Return the row of a reducer of some parameters; by default of the matrices."""
    chosen = which or {"min_dims": 2}
    return Row(
        name=name,
        make=lambda density, seed: micro.Split(reducer=seeded(reducer, density, seed), **chosen),
        follows_density=False,
        **promises,
    )


def two_level(reducer: micro.Reducer, density: micro.Density[Any] | float, seed: int) -> micro.TwoLevel:
    """Return a reducer between nodes of two ranks."""
    return micro.TwoLevel(reducer=seeded(reducer, density, seed), ranks_per_node=2)


def between_nodes(name: str, reducer: micro.Reducer, **promises: Any) -> Row:
    """Return the row of a reducer between nodes; k is that of each shard, in sum."""
    return Row(
        name=name,
        make=lambda density, seed: two_level(reducer, density, seed),
        follows_density=False,
        traffic_within=None,
        ranks_per_node=2,
        **promises,
    )


ROWS: tuple[Row, ...] = (
    sparse("per_tensor+topk+gather", micro.PerTensor(selector=micro.TopK()), BUILD_UP, exchange=GATHER),
    sparse("per_tensor+micro+agreed", micro.PerTensor(selector=micro.Micro()), EXACT),
    sparse("per_tensor+micro+published", micro.PerTensor(selector=micro.Micro(rule="published")), None),
    sparse("per_tensor+leader", micro.PerTensor(selector=micro.Leader()), EXACT),
    sparse("scaled+micro+agreed", micro.Scaled(selector=micro.Micro()), EXACT),
    sparse("scaled_elements+micro+agreed", ScaledElements(selector=micro.Micro()), EXACT),
    sparse(
        "in_pieces+topk+gather",
        micro.TopK(),
        BUILD_UP,
        exchange=micro.InPieces(each=GATHER, piece_mb=PIECE_MB),
        promises=UNSAID,
    ),
    sparse(
        "in_pieces+micro+agreed",
        micro.Micro(),
        EXACT,
        exchange=micro.InPieces(each=micro.Union(), piece_mb=PIECE_MB),
        promises=UNSAID,
    ),
    split("split+micro", MICRO, band=EXACT, **BIAS),
    split("split+topk+gather", TOPK, which={"dense": ("*a*.weight",)}, band=BUILD_UP, dense=("a.weight",)),
    split("split+powersgd", POWERSGD, band=EXACT, mixes=True, **BIAS),
    between_nodes("two_level+dense", micro.DenseReducer(), band=EXACT, num_collectives=4),
    between_nodes("two_level+micro", MICRO, band=EXACT, num_collectives=7),
    between_nodes("two_level+topk+gather", TOPK, band=BUILD_UP, num_collectives=7),
    Row(
        name="two_level+split+micro",
        make=lambda density, seed: two_level(
            micro.Split(reducer=seeded(MICRO, density, seed), min_dims=2), density, seed
        ),
        band=EXACT,
        follows_density=False,
        traffic_within=None,
        num_collectives=8,
        dense=("a.bias",),
        ranks_per_node=2,
    ),
    Row(
        name="split+two_level+topk+gather",
        make=lambda density, seed: micro.Split(reducer=two_level(TOPK, density, seed), min_dims=2),
        band=BUILD_UP,
        follows_density=False,
        num_collectives=8,
        ranks_per_node=2,
        **BIAS,
    ),
)
