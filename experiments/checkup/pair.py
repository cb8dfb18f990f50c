"""Two ranks on this machine that measure all-reduces, and MiCRO's reduction of a model's gradient."""

from dataclasses import dataclass

import torch

import models
from experiments.profiles.link import measure_op
from experiments.profiles.select import own_seconds
from experiments.ranks.group import RankGroup
from micro.group_comm import GroupComm

WORLD_SIZE = 2
TIMEOUT_S = 100  # if kernels are not compiled yet, their compilation takes most of this
MODEL, SIZES_OF_DATA = "resnet18", {"in_channels": 3, "num_classes": 10}
DENSITY = 0.01
SIZES = [64, 2**12, 2**16, 2**20, 2**22, 2**24]  # bytes of a vector
REPEATS, SECONDS = 16, 3.0  # of each size where all of them take no longer
STEPS = 5  # numbers of reductions, after a warm-up


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
    sizes: list[float]
    seconds: list[float]
    select_s: float


def measured_pair() -> Measured:
    """Start two ranks and return what they measure. Raises: RankFailure: one failed, or they took too long."""
    with RankGroup(WORLD_SIZE, env={"OMP_NUM_THREADS": "1"}, collective_s=TIMEOUT_S) as ranks:
        found: Measured = ranks.call(measure, timeout_s=TIMEOUT_S)[0]
    return found


def measure() -> Measured:
    """Time all-reduces of several sizes, and MiCRO's reduction of a model's gradient; both ranks call this."""
    points = measure_op("all_reduce", SIZES, GroupComm(), torch.device("cpu"), REPEATS, SECONDS)
    with torch.device("meta"):  # only the shapes are needed
        numel = sum(p.numel() for p in models.build(MODEL, sizes=SIZES_OF_DATA).parameters())
    return Measured(
        model=MODEL,
        numel=numel,
        density=DENSITY,
        sizes=[size for size, _ in points],
        seconds=[seconds for _, seconds in points],
        select_s=own_seconds("micro", numel, DENSITY, STEPS),
    )
