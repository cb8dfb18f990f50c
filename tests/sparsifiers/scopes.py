"""Methods within each tensor, in units of scales, on some parameters, and between nodes of two ranks."""

from typing import Any

import micro
from micro.selectors.scaled_elements import ScaledElements
from tests.sparsifiers.base import BUILD_UP, EXACT, GATHER, Row, row, sparse

MICRO, TOPK = micro.SparseReducer(micro.Micro(), 0.05), micro.SparseReducer(micro.TopK(), 0.05, exchange=GATHER)
POWERSGD = micro.PowerSGD(rank=2, min_compression=1.5)
UNSAID: dict[str, Any] = {"traffic_within": None}
SPLIT: dict[str, Any] = {"follows_density": False}
BIAS: dict[str, Any] = {"dense": ("a.bias",), "names_rank": False, **SPLIT}  # whose mean is the same on all ranks
NODES: dict[str, Any] = {"ranks_per_node": 2, **UNSAID, **SPLIT}  # k is that of each shard, in sum


def matrices(reducer: micro.Reducer) -> micro.Split:
    return micro.Split(reducer=reducer, min_dims=2)


def two_level(reducer: micro.Reducer) -> micro.TwoLevel:
    return micro.TwoLevel(reducer=reducer, ranks_per_node=2)


ROWS: tuple[Row, ...] = (
    sparse("per_tensor+topk+gather", micro.PerTensor(selector=micro.TopK()), BUILD_UP, exchange=GATHER),
    sparse("per_tensor+leader", micro.PerTensor(selector=micro.Leader()), EXACT),
    sparse("scaled_elements+micro+agreed", ScaledElements(selector=micro.Micro()), EXACT),
    row("split+micro", matrices(MICRO), EXACT, **BIAS),
    row("split+topk+gather", micro.Split(reducer=TOPK, dense=("*a*.weight",)), BUILD_UP, dense=("a.weight",), **SPLIT),
    row("split+powersgd", matrices(POWERSGD), EXACT, mixes=True, **BIAS),
    row("two_level+dense", two_level(micro.DenseReducer()), EXACT, num_collectives=4, **NODES),
    row("two_level+micro", two_level(MICRO), EXACT, num_collectives=7, **NODES),
    row("two_level+topk+gather", two_level(TOPK), BUILD_UP, num_collectives=7, **NODES),
    row("two_level+split+micro", two_level(matrices(MICRO)), EXACT, num_collectives=8, dense=("a.bias",), **NODES),
    row(
        "split+two_level+topk+gather", matrices(two_level(TOPK)), BUILD_UP, num_collectives=8, ranks_per_node=2, **BIAS
    ),
)
