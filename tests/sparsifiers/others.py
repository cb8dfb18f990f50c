"""DEFT, ExDyna, gTop-k, DSA, Accordion, PowerSGD, FFT sparsification, DeMo."""

from typing import Any

import micro
from micro.exchanges.dsa import DSA
from micro.parts import Rule
from micro.reducers.powersgd import PowerSGD
from micro.zoo.dct import DCTReducer
from micro.zoo.deft import Deft
from micro.zoo.exdyna import ExDyna
from micro.zoo.fft import FFTReducer
from micro.zoo.gtopk import GTopK
from tests.sparsifiers.base import ABOUT, BUILD_UP, EXACT, GATHER, Row, sparse

LOSSY: dict[str, Any] = {"conserves_mass": False}


def accordion(name: str, rule: Rule) -> Row:
    """Return the row of top-k by layer with Accordion's density: doubled where critical, checked every other step."""

    def make(density: micro.Density[Any] | float, seed: int) -> micro.Reducer:
        low = density.density if isinstance(density, micro.Density) else density
        settings = {"name": "accordion", "density": low, "high": 2 * low, "interval": 2, "rule": rule}
        policy = micro.build(micro.Density, settings)
        return micro.SparseReducer(micro.TopK(scope="layer"), policy, exchange=GATHER, seed=seed)

    return Row(name=name, make=make, follows_density=False)


def transforming(name: str, reducer: type[Any], promises: Any = None, **settings: Any) -> Row:
    """Return the row of a method that sends coefficients: they are counted, and an update is made of many."""
    return Row(
        name=name,
        make=lambda density, seed: reducer(density=density, seed=seed, **settings),
        band=BUILD_UP,
        updated="other",
        mixes=True,
        **promises or {},
    )


ROWS: tuple[Row, ...] = (
    sparse("exdyna+repaired", ExDyna(), EXACT),
    sparse("exdyna+published", ExDyna(rule="published"), None),
    sparse("deft+repaired", Deft(), EXACT),
    sparse("deft+published", Deft(rule="published"), None),
    sparse("gtopk", micro.TopK(), EXACT, exchange=GTopK()),
    sparse("gtopk+published", micro.TopK(), EXACT, exchange=GTopK(rule="published"), promises=LOSSY),
    sparse("dsa", micro.TopK(), BUILD_UP, exchange=DSA(), promises=ABOUT),
    sparse("dsa+published", micro.TopK(), None, exchange=DSA(rule="published"), promises=ABOUT | LOSSY),
    sparse(
        "threshold+gather+published",
        micro.Threshold(),
        None,
        exchange=micro.Gather(rule="published"),
        promises=LOSSY,
    ),
    accordion("accordion", "repaired"),
    accordion("accordion+published", "published"),
    Row(
        name="powersgd",
        make=lambda _density, seed: PowerSGD(rank=2, min_compression=1.5, seed=seed),
        band=EXACT,
        follows_density=False,
        mixes=True,
    ),
    transforming("fft", FFTReducer, LOSSY, feedback=micro.NoFeedback()),
    transforming("fft+residual", FFTReducer, feedback=micro.ErrorFeedback()),
    transforming("fft+residual+raw", FFTReducer, feedback=micro.ErrorFeedback(), bits=32),
    transforming("dct", DCTReducer, size=4),  # so that the laws' matrices have whole tiles and edges
    transforming("dct+none", DCTReducer, size=4, transform="none"),
    transforming("dct+senders", DCTReducer, LOSSY, size=4, exchange=micro.Gather(rule="senders")),
)
