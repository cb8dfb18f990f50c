"""Steps of whole methods on several GPUs over NCCL, each against a dense all-reduce of the same vector.

The same code runs on CPUs over gloo, which is how it is tested.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from experiments.benchmarks.gpu_steps import DENSITY, step_of
from experiments.ranks.group import measuring_ranks
from experiments.ranks.measures import Row, Settings, own_device, slowest
from experiments.studies.methods import build_methods
from micro.comm import GroupComm

ROUNDS = 20
Call = Callable[[Settings], Row]


def report(methods: Sequence[str], numel: int, num_gpus: int) -> Iterator[str]:
    """Return the section of the report, as Markdown; with fewer than two GPUs it says that there is nothing in it."""
    yield from ("", f"## Steps over NCCL at d = {numel:,}, density {DENSITY}", "")
    if num_gpus < 2:
        yield f"Not measured: two GPUs are needed, {num_gpus} is visible."
        return
    with measuring_ranks(num_gpus) as ranks:
        yield from table(methods, numel, lambda settings: ranks.call(work, settings)[0])


def table(methods: Sequence[str], numel: int, call: Call) -> Iterator[str]:
    """Return a row for each method, as Markdown.

    Args:
        call: has all ranks `work`, and returns what the first one says.
    """
    yield "| method | ranks | ms | all-reduce ms | of an all-reduce | MB sent |"
    yield "|---|---:|---:|---:|---:|---:|"
    for method in methods:
        row = call({"method": method, "numel": numel})
        if row["problem"]:
            yield f"| `{method}` | {row['ranks']} | - | - | - | {row['problem']} |"
            continue
        ratio = row["step_s"] / row["dense_s"]
        times = f"{1e3 * row['step_s']:.3f} | {1e3 * row['dense_s']:.3f} | {ratio:.2f}"
        yield f"| `{method}` | {row['ranks']} | {times} | {row['sent'] / 1e6:.3f} |"


def work(settings: Settings) -> Row:
    """Return the median seconds of a method's step and of an all-reduce, taken in turn; each as on the slowest rank."""
    device, numel, comm = own_device(), settings["numel"], GroupComm()
    row: Row = {"ranks": comm.world_size, "problem": ""}
    try:
        reducer = build_methods([settings["method"]], DENSITY)[settings["method"]]
        step = step_of(reducer, numel, device, comm)
        vector = torch.zeros(numel, device=device)
        works = (step, lambda: comm.all_reduce_(vector))
        pairs = [[_seconds(work, comm, device) for work in works] for _ in range(ROUNDS)]
        step()
    except (RuntimeError, ValueError) as error:  # of one method, on all ranks alike: the others are measured
        return row | {"problem": str(error).splitlines()[0]}
    steps, dense = (statistics.median(times) for times in zip(*pairs, strict=True))
    return row | {"step_s": steps, "dense_s": dense, "sent": sum(comm.traffic.num_bytes.values())}


def _seconds(task: Callable[[], object], comm: GroupComm, device: torch.device) -> float:
    dist.barrier()
    started = comm.now(device)
    task()
    return slowest(float(comm.now(device) - started), device)
