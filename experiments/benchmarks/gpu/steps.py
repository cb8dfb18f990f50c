"""A step of every method on GPUs, each beside a dense all-reduce of the same vector.

With one GPU nothing travels: what is measured is all but the wire. The same code runs on CPUs over gloo, which is how
it is tested.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

import micro
from experiments.benchmarks.gpu import timing
from experiments.benchmarks.tables import Column, Columns
from experiments.ranks.group import RankGroup
from experiments.ranks.measures import Row, Settings, own_device, slowest
from experiments.studies.methods import build_methods
from micro.comm import GroupComm
from micro.flat import Layout
from micro.randomness import generator

DENSITY = 0.01
ROUNDS, WARMUP = 20, 5  # after which thresholds and kernels have settled
COLUMNS: Columns = {
    "method": Column("method"),
    "ms": Column("step_s", "{:.3f}", 1e3),
    "all-reduce ms": Column("dense_s", "{:.3f}", 1e3),
    "of an all-reduce": Column("share", "{:.2f}"),
    "MB sent": Column("sent", "{:.3f}", 1e-6),
    "operations that make the host wait": Column("waits", "{:.0f}"),
    "problem": Column("problem"),
}
Work = Callable[[], object]


def rows(ranks: RankGroup, methods: Sequence[str], numel: int) -> Iterator[Row]:
    """Yield a row for each method, of rank 0."""
    for method in methods:
        yield ranks.call(work, {"method": method, "numel": numel})[0]


def work(settings: Settings) -> Row:
    """Return the median seconds of a method's step and of an all-reduce, taken in turn; each as on the slowest rank."""
    method, numel, device, comm = settings["method"], settings["numel"], own_device(), GroupComm()
    try:
        step = step_of(build_methods([method], DENSITY)[method], numel, device, comm)
        vector = torch.zeros(numel, device=device)
        works: tuple[Work, Work] = (step, lambda: comm.all_reduce_(vector))
        pairs = [[_seconds(each, comm, device) for each in works] for _ in range(ROUNDS)]
        step()
    except (RuntimeError, ValueError) as error:  # of one method, on all ranks alike: the others are measured
        return {"method": method, "problem": str(error).splitlines()[0]}
    step_s, dense_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    sent = sum(comm.traffic.num_bytes.values())
    row = {
        "method": method,
        "step_s": step_s,
        "dense_s": dense_s,
        "share": step_s / dense_s,
        "sent": sent,
        "problem": "",
    }
    if device.type == "cuda":
        row |= {"waits": timing.waits(step)}
    return row


def step_of(reducer: micro.Reducer, numel: int, device: torch.device, comm: micro.Comm) -> Work:
    """Return a step, the same gradient each time, after its first steps."""
    layout = Layout(("matrix", "rest"), ((numel // 64, 64), (numel % 64,)))
    source = torch.randn(numel, generator=generator(comm.rank)).to(device)
    grad, state = torch.empty_like(source), reducer.start(layout, source.dtype, device)

    @torch.no_grad()
    def step() -> None:
        grad.copy_(source)
        comm.begin_step()
        reducer.reduce_(state, grad, comm)

    reducer.prepare(comm, device)
    for _ in range(WARMUP):
        step()
    return step


def _seconds(task: Work, comm: GroupComm, device: torch.device) -> float:
    dist.barrier()
    started = comm.now(device)
    task()
    return slowest(float(comm.now(device) - started), device)
