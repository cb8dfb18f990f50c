"""The measurements of the two ranks: all-reduces, and MiCRO's reduction of a model's gradient."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import micro
import models
from experiments.checkup.pair import Measured
from micro import kernels
from micro.comm import GroupComm

MODEL, SIZES_OF_DATA = "resnet18", {"in_channels": 3, "num_classes": 10}
DENSITY = 0.01
REPEATS = {64: 16, 2**12: 16, 2**16: 10, 2**20: 6, 2**22: 4, 2**24: 3}  # bytes of a vector: number of timed all-reduces
WARMUP, STEPS = 2, 5  # numbers of reductions


def measure() -> Measured:
    """Time all-reduces of several sizes, and MiCRO's reduction of a model's gradient."""
    comm = GroupComm()
    seconds = [
        _median_s(partial(comm.all_reduce_, torch.zeros(size // 4)), repeats, comm) for size, repeats in REPEATS.items()
    ]
    with torch.device("meta"):  # only the shapes are needed
        numel = sum(p.numel() for p in models.build(MODEL, sizes=SIZES_OF_DATA).parameters())
    return Measured(
        model=MODEL,
        numel=numel,
        density=DENSITY,
        sizes=list(REPEATS),
        seconds=seconds,
        select_s=_select_s(numel, comm),
    )


def _median_s(call: Callable[[], object], repeats: int, comm: GroupComm) -> float:
    """Return the median seconds that a collective takes on the slower rank; the first call does not count."""
    call()
    taken = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return _slower(statistics.median(taken), comm)


def _select_s(numel: int, comm: GroupComm) -> float:
    """Return the median seconds of a MiCRO reduction of (numel,) without its collectives."""
    kernels.prepare()
    reducer = micro.SparseReducer(micro.Micro(), density=DENSITY)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    state, grad = reducer.start(micro.Layout.flat(numel), gradient.dtype, gradient.device), torch.empty_like(gradient)
    taken = []
    for _ in range(WARMUP + STEPS):
        grad.copy_(gradient)
        comm.begin_step()
        stats = reducer.reduce_(state, grad, comm)
        taken.append(stats.select_s + stats.rest_s)
    return _slower(statistics.median(taken[WARMUP:]), comm)


def _slower(mine: float, comm: GroupComm) -> float:
    return float(comm.gather_rows(torch.tensor([mine], dtype=torch.float64)).max())
