"""Every method's reduction against its floor.

Methods are those of conf/sparsifier. The floor is what a sparse step has to move whatever it selects:
``residual.add_(grad)``, one read of the rank's own slice, ``grad.zero_()``. It is timed beside every single step, so
that a machine that slows down slows both. ``floors`` is what a step takes beside the wire, select + rest, by that time;
``passes`` is how often one more step, which is not timed, goes over the vector (`experiments.benchmarks.passes`). The
floor itself makes two and a part.
"""

import argparse
import statistics

import pandas as pd
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import micro
from experiments.benchmarks.goals import goal, verdict
from experiments.benchmarks.passes import count_passes
from experiments.config.command_line import comma_list
from experiments.config.option_types import to_density, whole_number
from experiments.config.ranges import MOST_ON_A_MACHINE
from experiments.launching.measurements import Row, Settings, measure, own_device, slowest
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from experiments.studies.gradient_sources import fitting_scale, layered
from experiments.studies.methods import build_methods, known_methods, select_names
from micro.comm import GroupComm
from micro.density.base import target_count
from micro.partition import equal_slice

NAME = "step"
WARMUP = 40  # the repaired rule searches while residuals fill up, and steers after


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--numel",
        type=comma_list(whole_number()),
        default="11181642,25557032",
        metavar="D,D",
        help="lengths d (ResNet-18, -50)",
    )
    parser.add_argument(
        "--density", type=comma_list(to_density), default="0.01,0.001", metavar="P,P", help="(%(default)s)"
    )
    parser.add_argument(
        "--methods", type=comma_list(str), default=[], metavar="A,B", help="names of conf/sparsifier; all by default"
    )
    parser.add_argument("--nproc", type=whole_number(1, MOST_ON_A_MACHINE), default=2, help="ranks")
    parser.add_argument("--steps", type=whole_number(), default=15, help="steps that count, after a warm-up")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    methods = select_names(arguments.methods, known_methods(), "methods")
    build_methods(methods, arguments.density[0])  # a mistake shows here, not on the ranks
    frames = []
    for numel in arguments.numel:
        for density in arguments.density:
            settings = {"numel": numel, "density": density, "nproc": arguments.nproc, "steps": arguments.steps}
            with console.status(f"d = {numel:,}, density {density:g}"):
                rows = measure(work, settings | {"methods": methods}, arguments.nproc)
            rows = [row | {"goal_floors": goal(row["method"])} for row in rows]
            frames.append(pd.DataFrame(rows).assign(**settings))
            console.print(_table(rows, settings))
    for path in write_or_rescue(lambda out: [write_csv(pd.concat(frames), out / "step.csv")], arguments.out):
        console.print(f"wrote {path}")


def _table(rows: list[Row], settings: Settings) -> Table:
    title = "d = {numel:,}, density {density:g}, {nproc} ranks; medians of {steps} steps".format(**settings)
    table = Table(title=title)
    for column in (
        "method",
        "select ms",
        "rest ms",
        "exchange ms",
        "total ms",
        "floor ms",
        "floors",
        "goal",
        "met",
        "passes",
        "MB sent",
        "density / target",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"],
            *(f"{1e3 * row[key]:.2f}" for key in ("select_s", "rest_s", "exchange_s", "total_s", "floor_s")),
            f"{row['floors']:.2f}",
            f"{row['goal_floors']:g}" if row["goal_floors"] else "",
            verdict(row["method"], row["floors"]),
            f"{row['passes']:.1f}",
            f"{row['bytes_sent'] / 1e6:.3f}",
            f"{row['build_up']:.2f}",
        )
    return table


def work(settings: Settings) -> list[Row]:
    """Measure all methods at one length and density; a row per method, of medians over steps."""
    device = own_device()
    numel, rank = settings["numel"], dist.get_rank()
    randomness = torch.Generator().manual_seed(rank)
    scale = fitting_scale(settings["density"], numel)
    gradients = [scale * torch.randn(numel, generator=randomness).to(device) for _ in range(3)]
    reducers = build_methods(settings["methods"], settings["density"])
    rows = [_measure(name, reducer, gradients, settings["steps"], device) for name, reducer in reducers.items()]
    return [*rows, _one_topk(gradients[0], target_count(settings["density"], numel), settings["steps"], device)]


def _measure(name: str, reducer: micro.Reducer, gradients: list[torch.Tensor], steps: int, device: torch.device) -> Row:
    comm = GroupComm()
    numel = gradients[0].numel()
    state = reducer.start(layered(numel), torch.float32, device)
    grad = torch.empty_like(gradients[0])
    residual = torch.zeros_like(grad)
    taken: list[dict[str, float]] = []
    for step in range(WARMUP + steps):
        _draw_(grad, gradients, step)
        dist.barrier()
        comm.begin_step()
        started = comm.now(device)
        stats = reducer.reduce_(state, grad, comm)
        total_s = comm.now(device) - started
        floor_s = _floor(residual, gradients[0], grad, comm)
        times = {"select_s": stats.select_s, "rest_s": stats.rest_s, "exchange_s": stats.exchange_s}
        row = {key: slowest(value, device) for key, value in {**times, "total_s": total_s, "floor_s": floor_s}.items()}
        own = slowest(stats.select_s + stats.rest_s, device)
        sizes = {
            "bytes_sent": stats.bytes_sent,
            "indices_bytes": stats.indices_bytes,
            "values_bytes": stats.values_bytes,
        }
        taken.append({**row, "floors": own / row["floor_s"], **sizes, "build_up": stats.build_up})
    counted = taken[WARMUP:]
    _draw_(grad, gradients, WARMUP + steps)
    comm.begin_step()
    passes = slowest(count_passes(lambda: reducer.reduce_(state, grad, comm), numel), device)
    return {"method": name, "passes": passes} | {
        key: statistics.median(row[key] for row in counted) for key in counted[0]
    }


def _draw_(grad: torch.Tensor, gradients: list[torch.Tensor], step: int) -> None:
    """Fill ``grad`` with a gradient that no earlier step had: one of a few, turned by a random number of places."""
    source = gradients[step % len(gradients)]
    turn = int(torch.randint(1, source.numel(), (1,), generator=torch.Generator().manual_seed(step)))
    grad[:turn].copy_(source[-turn:])
    grad[turn:].copy_(source[:-turn])


def _floor(residual: torch.Tensor, gradient: torch.Tensor, grad: torch.Tensor, comm: GroupComm) -> float:
    first, stop = equal_slice(residual.numel(), comm.world_size, comm.rank)
    dist.barrier()
    started = comm.now(residual.device)
    residual.add_(gradient)
    residual[first:stop].sum()
    grad.zero_()
    return comm.now(residual.device) - started


def _one_topk(gradient: torch.Tensor, k: int, steps: int, device: torch.device) -> Row:
    """Time torch.topk itself on the same vector, for scale."""
    comm = GroupComm()
    residual, grad = torch.zeros_like(gradient), gradient.clone()
    times, floors = [], []
    for _ in range(max(3, steps // 3)):
        dist.barrier()
        started = comm.now(device)
        torch.topk(gradient.abs(), k, sorted=False)
        times.append(slowest(comm.now(device) - started, device))
        floors.append(slowest(_floor(residual, gradient, grad, comm), device))
    select_s, floor_s = statistics.median(times), statistics.median(floors)
    passes = count_passes(lambda: torch.topk(gradient.abs(), k, sorted=False), gradient.numel())
    row = dict.fromkeys(("rest_s", "exchange_s", "bytes_sent", "indices_bytes", "values_bytes", "build_up"), 0.0)
    return {
        "method": "(torch.topk alone)",
        **row,
        "passes": passes,
        "select_s": select_s,
        "total_s": select_s,
        "floor_s": floor_s,
        "floors": select_s / floor_s,
    }
