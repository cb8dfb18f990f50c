"""Two ranks of this machine that measure, started early: they import while the caller does other things."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from experiments.launching.failures import RankFailure
from experiments.launching.process_lifetime import exit_at_termination
from experiments.launching.rank_group import RankGroup

WORLD_SIZE = 2
TIMEOUT_S = 100  # where kernels are not compiled yet, that takes longer than all the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the two ranks measured.

    Attributes:
        model: whose gradient was reduced.
        numel: elements of it.
        density: the target of MiCRO.
        sizes, seconds: of an all-reduce between the two: bytes of the vector, and medians.
        select_s: what a reduction of that gradient by MiCRO takes beside its collectives, on the slower rank.
    """

    model: str
    numel: int
    density: float
    sizes: list[int]
    seconds: list[float]
    select_s: float


@contextmanager
def measuring_pair() -> Iterator[Callable[[], Measured]]:
    """Start the two ranks; yields a function that waits for what they measure.

    It raises RuntimeError, in one line, where a rank failed or they took too long.
    """
    env = {"OMP_NUM_THREADS": "1"}
    with exit_at_termination(), RankGroup(WORLD_SIZE, env=env, collective_s=TIMEOUT_S) as ranks:
        ranks.send(_measure)
        yield partial(_receive, ranks)


def _receive(ranks: RankGroup) -> Measured:
    try:
        measured: Measured = ranks.receive(TIMEOUT_S)[0]
    except RankFailure as error:
        raise RuntimeError(f"two ranks on this machine could not measure: {error}") from None
    return measured


def _measure() -> Measured:
    from experiments.checkup.pair_measurement import measure  # it imports torch, which the caller need not have

    return measure()
