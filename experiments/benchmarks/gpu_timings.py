"""What only a GPU can tell: bandwidth of the kernels, reads by the host, capture in a CUDA graph."""

import statistics
import warnings
from collections.abc import Callable, Iterator

import torch

from experiments.benchmarks import gpu_steps
from experiments.studies.methods import known_methods
from micro.kernels import candidates
from micro.kernels.candidates import Candidates
from micro.randomness import generator

ROUNDS = 30
WARMUP = 5
DENSITY = 0.01
SLICES = 8  # a rank of MiCRO among as many searches an eighth


def report(device: torch.device, numel: int) -> Iterator[str]:
    """Return the sections of the report, as Markdown."""
    yield from ("", f"## Bandwidth at d = {numel:,}, float32, density {DENSITY}", "")
    yield "| kernel | ms | GB/s | share of a copy's |"
    yield "|---|---:|---:|---:|"
    copied = 0.0
    for name, work, moved in _works(device, numel):
        seconds = _seconds(work)
        copied = copied or moved / seconds
        rate = moved / seconds
        yield f"| {name} | {1e3 * seconds:.3f} | {rate / 1e9:.0f} | {rate / copied:.2f} |"
    yield from ("", "## Reads by the host and CUDA graphs", "")
    yield "| kernel | operations that make the host wait | captured in a graph |"
    yield "|---|---:|---|"
    for name, work, _ in _works(device, numel):
        yield f"| {name} | {_waits(work)} | {_capture(work)} |"
    yield from ("", f"## Steps of one rank at d = {numel:,}, density {gpu_steps.DENSITY}", "")
    yield from gpu_steps.table(known_methods(), numel, device, gpu_steps.Meters(_seconds, _waits, _capture))


def _works(device: torch.device, numel: int) -> Iterator[tuple[str, Callable[[], object], float]]:
    """Return what is timed, each with the bytes that it moves; a copy first."""
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
    yield "above", lambda: triton.above(x, cut), 4 * numel + 4 * numel
    yield "count by magnitude", lambda: triton.magnitude_counts(x, 0, 20, 2040), 4 * numel
    yield "sums", lambda: summing.sums(x, -1.0), 4 * numel
    yield "absorb and sum", lambda: summing.absorb_and_sum_(residual, grad), 16 * numel
    yield "scatter", lambda: triton.scatter_add_(target, indices, values), 16 * indices.numel()


def _seconds(work: Callable[[], object]) -> float:
    """Return the median seconds of ``work`` on the device."""
    times = []
    for _ in range(WARMUP + ROUNDS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) / 1e3)
    return statistics.median(times[WARMUP:])


def _waits(work: Callable[[], object]) -> int:
    """Return how many operations of ``work`` PyTorch reports as waiting for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in heard)


def _capture(work: Callable[[], object]) -> str:
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
