"""Two ranks on this machine that measure; they start early, so that they import while the caller works."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from experiments.launching.process_lifetime import exit_at_termination
from experiments.ranks.group import RankFailure, RankGroup

WORLD_SIZE = 2
TIMEOUT_S = 100  # if kernels are not compiled yet, their compilation takes most of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the two ranks measured.

    Attributes:
        model: the model whose gradient was reduced.
        numel: number of its elements.
        density: the target density of MiCRO.
        sizes, seconds: all-reduces between the two ranks: bytes of the vectors, and median times.
        select_s: time of a reduction of that gradient by MiCRO without its collectives, on the slower rank.
    """

    model: str
    numel: int
    density: float
    sizes: list[int]
    seconds: list[float]
    select_s: float


@contextmanager
def measuring_pair() -> Iterator[Callable[[], Measured]]:
    """Start the two ranks; yield a function that waits for their measurements.

    The function raises RuntimeError, in one line, if a rank failed or they took too long.
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
    from experiments.checkup.pair_measurement import measure  # imports torch, which the caller does not need

    return measure()
