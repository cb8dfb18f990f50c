"""DEFT, ExDyna, gTop-k, DSA, PowerSGD, FFT sparsification, DeMo."""

from typing import Any

import micro
from micro.exchanges.dsa import DSA
from micro.reducers.powersgd import PowerSGD
from micro.zoo.dct import DCTReducer
from micro.zoo.deft import Deft
from micro.zoo.exdyna import ExDyna
from micro.zoo.fft import FFTReducer
from micro.zoo.gtopk import GTopK
from tests.sparsifiers.base import ABOUT, ALONE, BUILD_UP, EXACT, LOSSY, Row, row, sparse

TOPK, RESIDUAL, PUBLISHED = micro.TopK(), micro.ErrorFeedback(), micro.Gather(rule="published")
WAVES: dict[str, Any] = {"updated": "other", "mixes": True}  # coefficients are counted; an update is made of many


def tiles(**settings: Any) -> DCTReducer:
    """Return a reducer of tiles so small that the laws' matrices have whole ones and edges."""
    return DCTReducer(density=0.05, size=4, **settings)


ROWS: tuple[Row, ...] = (
    sparse("exdyna+repaired", ExDyna(), EXACT),
    sparse("exdyna+published", ExDyna(rule="published"), None),
    sparse("deft+repaired", Deft(), EXACT),
    sparse("deft+published", Deft(rule="published"), None),
    sparse("gtopk", TOPK, EXACT, exchange=GTopK()),
    sparse("gtopk+published", TOPK, EXACT, exchange=GTopK(rule="published"), **LOSSY),
    sparse("dsa", TOPK, BUILD_UP, exchange=DSA(), **ABOUT),
    sparse("dsa+published", TOPK, None, exchange=DSA(rule="published"), **ABOUT, **LOSSY),
    sparse("threshold+gather+published", micro.Threshold(), None, exchange=PUBLISHED, **LOSSY),
    row("powersgd", PowerSGD(rank=2, min_compression=1.5), EXACT, follows_density=False, mixes=True),
    row("fft", FFTReducer(density=0.05, feedback=ALONE), BUILD_UP, **WAVES, **LOSSY),
    row("fft+residual", FFTReducer(density=0.05, feedback=RESIDUAL), BUILD_UP, **WAVES),
    row("fft+residual+raw", FFTReducer(density=0.05, feedback=RESIDUAL, bits=32), BUILD_UP, **WAVES),
    row("dct", tiles(), BUILD_UP, **WAVES),
    row("dct+none", tiles(transform="none"), BUILD_UP, **WAVES),
    row("dct+senders", tiles(exchange=micro.Gather(rule="senders")), BUILD_UP, **WAVES, **LOSSY),
)
