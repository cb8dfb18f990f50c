"""Measure the seconds of each collective of Comm by size, on the ranks that will train.

All ranks start a collective together; its time is that of the slowest rank, the median over repeats.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from experiments.config.command_line import comma_list
from experiments.config.errors import UserError
from experiments.planning.tables import Curve, LinkTable
from experiments.tools.ranks.measures import Row, Settings, own_device, slowest
from experiments.tools.shared.markdown import table
from experiments.tools.shared.options import to_positive, whole_number
from micro.comm.group import GroupComm
from micro.comm.ranks import OPS, Op
from micro.comm.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast

NAME = "link"
SIZES = [4**power for power in range(3, 14)]
FEWEST_REPEATS = 3
FEWEST_SIZES = 2  # a curve needs so many
ELEMENT_BYTES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add, repeats = parser.add_argument, whole_number(FEWEST_REPEATS)
    help = "no rank receives more than the largest; by default from 64 B to 64 MiB by factors of 4"
    add("--sizes", type=comma_list(whole_number()), default=SIZES, metavar="BYTES,BYTES", help=help)
    add("--repeats", type=repeats, default=10, help="of each size, if time allows (%(default)s)")
    help = f"time to keep to, by fewer repeats, at least {FEWEST_REPEATS}, and by fewer large sizes (%(default)s)"
    add("--seconds", type=to_positive, default=60.0, help=help)
    add("--link", default="", metavar="TEXT", help="name of the link in titles")


def prepare(options: argparse.Namespace, world_size: int) -> Settings:
    """Return the settings of the ranks.

    Raises:
        UserError: a single rank, sizes that make no curve, or a number out of range.
    """
    if world_size < 2:
        raise UserError(f"a link joins ranks: --nproc must be at least 2, got {world_size}")
    sizes = sorted(set(options.sizes))
    if len(sizes) < FEWEST_SIZES or sizes[0] < ELEMENT_BYTES or any(size % ELEMENT_BYTES for size in sizes):
        given = ",".join(map(str, options.sizes))
        raise UserError(f"--sizes must be {FEWEST_SIZES} or more multiples of {ELEMENT_BYTES} bytes, got {given}")
    return {"sizes": sizes, "repeats": options.repeats, "seconds": options.seconds}


def sizes_of(op: Op, sizes: Sequence[int], world_size: int) -> list[int]:
    """Return the measured sizes of a collective, at which no rank receives more than the largest size."""
    received = world_size if op.startswith("gather") else 1
    return [size for place, size in enumerate(sizes) if place < FEWEST_SIZES or size * received <= sizes[-1]]


def work(settings: Settings) -> list[Row]:
    """Time all collectives; return a row of sizes and seconds for each."""
    comm, device, rows = GroupComm(timed=True), own_device(), []
    ends_at = time.perf_counter() + settings["seconds"]
    for place, op in enumerate(OPS):
        sizes = sizes_of(op, settings["sizes"], comm.world_size)
        left_s = slowest(max(0.0, ends_at - time.perf_counter()), device)  # unused time is for the remaining sizes
        points = measure_op(op, sizes, comm, device, settings["repeats"], left_s / (len(OPS) - place))
        rows.append(
            {
                "op": op,
                "sizes": [size for size, _ in points],
                "seconds": list(itertools.accumulate((seconds for _, seconds in points), max)),
                "largest_asked": sizes[-1],
                "backend": dist.get_backend(),
                "world_size": comm.world_size,
            }
        )
    return rows


def measure_op(
    op: Op, sizes: Sequence[int], comm: GroupComm, device: torch.device, repeats: int, left_s: float
) -> list[tuple[float, float]]:
    """Return the points (size, median seconds) of a collective over rising sizes.

    A point is repeated as often as its share of ``left_s``, the seconds for all of them, allows. If a large size would
    exceed them, it and all larger ones are left out.
    """
    points: list[tuple[float, float]] = []
    for place, size in enumerate(sizes):
        expected_s = points[-1][1] * size / points[-1][0] if points else 0.0
        if len(points) >= FEWEST_SIZES and (1 + FEWEST_REPEATS) * expected_s > left_s:
            break
        call = calls(op, size, comm, device)
        first_s = _timed(call, comm, device)  # not counted: the first call makes connections
        affordable = int(left_s / (len(sizes) - place) / first_s)
        seconds = [_timed(call, comm, device) for _ in range(max(FEWEST_REPEATS, min(repeats, affordable)))]
        sent = float(comm.traffic.calls[-1][1])  # whole elements: not always ``size`` bytes
        if not points or sent > points[-1][0]:
            points.append((sent, statistics.median(seconds)))
        left_s -= first_s + sum(seconds)
    return points


def _timed(call: Callable[[], object], comm: GroupComm, device: torch.device) -> float:
    """Return the seconds that the slowest rank takes."""
    dist.barrier()
    started = comm.now(device)
    call()
    return slowest(comm.now(device) - started, device)


def calls(op: Op, num_bytes: int, comm: GroupComm, device: torch.device) -> Callable[[], object]:
    """Return a function that calls a collective of about ``num_bytes``, counted as in LinkTable."""
    n, numel = comm.world_size, num_bytes // ELEMENT_BYTES
    x = torch.zeros(numel, device=device)
    if op == "gather_rows":
        return lambda: comm.answer(AllGather(mine=x))
    if op == "gather_lists":
        return lambda: comm.answer(AllGatherLists(mine=x, counts=[numel] * n))
    if op == "broadcast":
        return lambda: comm.answer(Broadcast(mine=x, source=0))
    if op == "scatter":
        piece = max(1, round(numel / (n - 1)))
        sizes = [0 if rank == comm.rank else piece for rank in range(n)]
        pieces = x.new_zeros(sum(sizes))
        return lambda: comm.answer(AllToAll(mine=pieces, sizes=sizes, received=sizes))
    return lambda: comm.answer(AllReduce(mine=x))


def merge(rows: list[Row], link: str) -> LinkTable:
    """Return the table of the link ``link``."""
    curves: dict[Op, Curve] = {
        row["op"]: Curve(sizes=tuple(row["sizes"]), seconds=tuple(row["seconds"])) for row in rows
    }
    return LinkTable(world_size=rows[0]["world_size"], backend=rows[0]["backend"], link=link, collectives=curves)


def write(rows: list[Row], options: argparse.Namespace, console: Console) -> list[Path]:
    """Write the table of the link and print it; return the paths."""
    found = merge(rows, options.link or f"{rows[0]['backend']}, {rows[0]['world_size']} ranks")
    found.save(options.out)
    console.print(f"{found.link}\n\n{_table(found)}", soft_wrap=True, highlight=False)
    for row in rows:
        if row["sizes"][-1] < 0.9 * row["largest_asked"]:
            console.print(
                f"{row['op']}: nothing above {row['sizes'][-1]:,.0f} of {row['largest_asked']:,} bytes was measured "
                f"within its share of {options.seconds:g} s; raise --seconds for more"
            )
    return [options.out]


def _table(found: LinkTable) -> str:
    columns = ["collective", "alpha ms", "beta ns/B", "largest error", "least ms", "at bytes", "most ms", "at bytes "]
    rows = []
    for op, curve in found.collectives.items():
        fit = [f"{1e3 * curve.alpha_s:.4g}", f"{1e9 * curve.beta_s:.4g}", f"{curve.error:.0%}"]
        ends = [[f"{1e3 * curve.seconds[end]:.4g}", f"{curve.sizes[end]:,.0f}"] for end in (0, -1)]
        rows.append([op, *fit, *itertools.chain(*ends)])
    return table(columns, rows)
