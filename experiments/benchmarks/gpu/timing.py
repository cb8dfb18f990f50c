"""What only a GPU can tell: seconds between events, operations that make the host wait, capture in a CUDA graph."""

import statistics
import warnings
from collections.abc import Callable, Iterator

import torch

from experiments.benchmarks.tables import Column, Columns
from experiments.ranks.measures import Row
from micro.kernels import candidates
from micro.kernels.candidates import Candidates
from micro.randomness import generator

ROUNDS, WARMUP = 30, 5
DENSITY = 0.01
SLICES = 8  # a rank of MiCRO among as many searches an eighth
KERNELS: Columns = {
    "kernel": Column("kernel"),
    "ms": Column("seconds", "{:.3f}", 1e3),
    "GB/s": Column("rate", "{:.0f}", 1e-9),
    "share of a copy's": Column("share", "{:.2f}"),
    "operations that make the host wait": Column("waits", "{:.0f}"),
    "captured in a graph": Column("captured"),
}
Work = Callable[[], object]


def kernel_rows(device: torch.device, numel: int) -> Iterator[Row]:
    """Yield a row for each kernel on float32 vectors, a copy first."""
    copied = 0.0
    for name, work, moved in _works(device, numel):
        elapsed = seconds(work)
        copied = copied or moved / elapsed
        facts = {"share": moved / elapsed / copied, "waits": waits(work), "captured": captured(work)}
        yield {"kernel": name, "seconds": elapsed, "rate": moved / elapsed, **facts}


def _works(device: torch.device, numel: int) -> Iterator[tuple[str, Work, float]]:
    """Yield what is timed, each with the bytes that it moves."""
    from micro.kernels import triton
    from micro.kernels.triton import summing

    x = torch.randn(numel, generator=generator(0)).to(device)
    grad, residual, target = x.clone(), x.clone(), torch.empty_like(x)
    cut = float(torch.topk(x.abs(), max(int(DENSITY * numel), 1)).values.min())
    bits = int(torch.tensor(cut).view(torch.int32))
    plan = candidates.plan(0, numel // SLICES, bits, 18, device)
    found = Candidates.empty(max(2 * int(DENSITY * numel) // SLICES, 1), residual)
    indices, values = triton.above(x, cut)
    grad.zero_()
    yield "copy", lambda: target.copy_(x), 8 * numel
    yield "absorb", lambda: triton.absorb_(residual, grad), 16 * numel
    yield "absorb and collect", lambda: triton.absorb_and_collect_(residual, grad, plan, found), 16 * numel
    yield "above", lambda: triton.above(x, cut), 8 * numel
    yield "count by magnitude", lambda: triton.magnitude_counts(x, 0, 20, 2040), 4 * numel
    yield "sums", lambda: summing.sums(x, -1.0), 4 * numel
    yield "absorb and sum", lambda: summing.absorb_and_sum_(residual, grad), 16 * numel
    yield "scatter", lambda: triton.scatter_add_(target, indices, values), 16 * indices.numel()


def seconds(work: Work) -> float:
    """Return the median seconds of ``work`` on the device, after a warm-up."""
    times = []
    for _ in range(WARMUP + ROUNDS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) / 1e3)
    return statistics.median(times[WARMUP:])


def waits(work: Work) -> int:
    """Return how many operations of ``work`` PyTorch reports as waiting for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in heard)


def captured(work: Work) -> str:
    """Return whether ``work`` runs in a CUDA graph, or why not."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"no: {str(error).splitlines()[0]}"
    return "yes"
