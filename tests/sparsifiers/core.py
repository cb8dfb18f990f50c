"""Dense, Top-k, CLT-k, hard-threshold, random-k and MiCRO, with other exchanges, codecs and index codecs."""

import micro
from micro.codecs.indices import Bitmap, Packed, Shortest
from tests.sparsifiers.base import ALONE, BUILD_UP, EXACT, GATHER, LOSSY, Band, Row, row, sparse, whole

TOPK, LEADER, MICRO, HALF = micro.TopK(), micro.Leader(), micro.Micro(), micro.Half()
LAYERS, MOMENTUM = micro.TopK(scope="layer"), micro.MomentumCorrection()
BY_LAYER = Band(0.8, lambda world_size: 1.2 * world_size)  # at least one of each layer; k of each is rounded down


def by_name(density: micro.Density | float, seed: int) -> micro.Reducer:
    """Make top-k by layer with another density for some layers."""
    rest = density.density if isinstance(density, micro.Density) else density
    policy = micro.ByName(patterns={"*a*.bias": 0.5, "*[b1].weight": 0.02}, density=rest)
    return micro.SparseReducer(LAYERS, policy, seed=seed)


ROWS: tuple[Row, ...] = (
    row("dense", micro.DenseReducer(), EXACT, names_rank=False, follows_density=False),
    sparse("topk+union", TOPK, BUILD_UP),
    sparse("topk+gather", TOPK, BUILD_UP, exchange=GATHER),
    sparse("topk+union+half", TOPK, BUILD_UP, codec=HALF),
    sparse("topk+gather+half", TOPK, BUILD_UP, exchange=GATHER, codec=HALF),
    sparse("topk+union+packed", TOPK, BUILD_UP, indices=Packed()),
    sparse("topk+gather+bitmap", TOPK, BUILD_UP, exchange=GATHER, indices=Bitmap()),
    sparse("topk+layers+union", LAYERS, BY_LAYER),
    sparse("topk+layers+gather", LAYERS, BY_LAYER, exchange=GATHER),
    row("topk+layers+by_name", by_name, BY_LAYER, follows_density=False),
    sparse("chunks+union", micro.TopK(scope="chunk", size=48), BUILD_UP),
    sparse("leader", LEADER, EXACT),
    sparse("leader+half", LEADER, EXACT, codec=HALF),
    sparse("leader+shortest", LEADER, EXACT, indices=Shortest()),
    sparse("threshold", micro.Threshold(), None),
    sparse("randomk", micro.RandomK(), EXACT, seeded=True),
    sparse("randomk+unbiased", micro.RandomK(unbiased=True), EXACT, feedback=ALONE, seeded=True, **LOSSY),
    sparse("micro+agreed", MICRO, EXACT),
    sparse("micro+agreed+half", MICRO, EXACT, codec=HALF),
    sparse("micro+agreed+half+shortest", MICRO, EXACT, codec=HALF, indices=Shortest()),
    sparse("micro+agreed+gather", MICRO, EXACT, exchange=GATHER),
    sparse("micro+agreed+decay", MICRO, EXACT, feedback=micro.ErrorFeedback(decay=0.95)),
    sparse("micro+published", micro.Micro(rule="published"), None),
    whole("micro+at one", MICRO),
    whole("topk+gather+momentum+at one", TOPK, exchange=GATHER, feedback=MOMENTUM),
    whole("topk+no feedback+at one", TOPK, feedback=ALONE, **LOSSY),
)
