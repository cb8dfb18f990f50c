"""Measure on a GPU: seconds between events, and operations that make the host wait."""

import statistics
import warnings
from collections.abc import Callable, Iterator

import torch

from experiments.tools.bench.tables import Column, Columns
from experiments.tools.ranks.measures import Row
from micro.values.randomness import generator

REPEATS, WARMUP = 30, 5
DENSITY = 0.01
KERNELS: Columns = {
    "kernel": Column("kernel"),
    "ms": Column("seconds", "{:.3f}", 1e3),
    "GB/s": Column("rate", "{:.0f}", 1e-9),
    "share of a copy's": Column("share", "{:.2f}"),
    "operations that make the host wait": Column("waits", "{:.0f}"),
}
Work = Callable[[], object]


def kernel_rows(device: torch.device, numel: int) -> Iterator[Row]:
    """Yield a row for each kernel on float32 vectors, a copy first."""
    copied = 0.0
    for name, work, moved in _works(device, numel):
        elapsed = seconds(work)
        copied = copied or moved / elapsed
        facts = {"share": moved / elapsed / copied, "waits": waits(work)}
        yield {"kernel": name, "seconds": elapsed, "rate": moved / elapsed, **facts}


def _works(device: torch.device, numel: int) -> Iterator[tuple[str, Work, float]]:
    """Yield the timed operations, each with its bytes of memory traffic."""
    from micro.kernels.triton import absorbing, scanning, summing

    x = torch.randn(numel, generator=generator(0)).to(device)
    grad, residual, target = x.clone(), x.clone(), torch.empty_like(x)
    cut = float(torch.topk(x.abs(), max(int(DENSITY * numel), 1)).values.min())
    grad.zero_()
    yield "copy", lambda: target.copy_(x), 8 * numel
    yield "absorb", lambda: absorbing.absorb_(residual, grad), 16 * numel
    yield "above", lambda: scanning.above(x, cut), 8 * numel
    yield "sums", lambda: summing.sums(x, -1.0), 4 * numel
    yield "absorb and sum", lambda: summing.absorb_and_sum_(residual, grad), 16 * numel


def seconds(work: Work) -> float:
    """Return the median seconds of ``work`` on the device, after a warm-up."""
    times = []
    for _ in range(WARMUP + REPEATS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) / 1e3)
    return statistics.median(times[WARMUP:])


def waits(work: Work) -> int:
    """Return the number of operations of ``work`` that PyTorch reports as waiting for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in heard)
