"""How long each collective of micro.Comm takes over its size, on the ranks that will train.

All ranks start a collective together; it takes as long as on its slowest rank, and the median over repeats counts.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from experiments.config.command_line import comma_list
from experiments.config.errors import UserError
from experiments.config.option_types import to_positive, whole_number
from experiments.profiles.drawing import draw_curves, numbers_of
from experiments.profiles.measure_on_ranks import Report
from experiments.ranks.measures import Row, Settings, slowest
from experiments.reports.figure_parts import save
from micro.comm import GroupComm
from micro.operations import OPS, Op
from micro.planning.tables import Curve, LinkTable

NAME = "link"
SMALLEST, LARGEST, FACTOR = 64, 64 * 2**20, 4
FEWEST_REPEATS = 3
FEWEST_SIZES = 2  # that make a curve
ELEMENT_BYTES = 4
BYTES_OF = {
    "all_reduce": "the vector",
    "gather_rows": "one rank's row",
    "gather_lists": "one rank's list",
    "scatter": "what one rank sends",
    "broadcast": "the vector",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    sizes = [SMALLEST * FACTOR**power for power in range(round(math.log(LARGEST / SMALLEST, FACTOR)) + 1)]
    parser.add_argument(
        "--sizes",
        type=comma_list(whole_number()),
        default=sizes,
        metavar="BYTES,BYTES",
        help=f"no rank receives more than the largest; by default from {SMALLEST} B to 64 MiB by factors of {FACTOR}",
    )
    parser.add_argument(
        "--repeats", type=whole_number(FEWEST_REPEATS), default=10, help="of each size where time allows (%(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=to_positive,
        default=60.0,
        help=f"time to keep to, by fewer repeats, at least {FEWEST_REPEATS}, and by fewer large sizes (%(default)s)",
    )
    parser.add_argument("--link", default="", metavar="TEXT", help="what to call the link in titles")


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
    return {
        "sizes": sizes,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "num_parts": sum(len(sizes_of(op, sizes, world_size)) for op in OPS),
        "label": f"link of {world_size} ranks",
    }


def sizes_of(op: Op, sizes: Sequence[int], world_size: int) -> list[int]:
    """Return the sizes at which a collective is measured: those at which no rank receives more than the largest."""
    received = world_size if op.startswith("gather") else 1
    return [size for place, size in enumerate(sizes) if place < FEWEST_SIZES or size * received <= sizes[-1]]


@dataclass(slots=True)
class Budget:
    """Seconds to spend on points that are still to come; the same on all ranks, as what they spend is.

    Attributes:
        left_s: seconds left for them all.
        num_points: how many they are.
        most: repeats of a point that costs little.
    """

    left_s: float
    num_points: int
    most: int

    def repeats(self, once_s: float) -> int:
        """Return how often to repeat a point that took ``once_s``: what its equal share has time for, within bounds."""
        share_s = self.left_s / max(1, self.num_points)
        return max(FEWEST_REPEATS, min(self.most, int(share_s / once_s)))

    def affords(self, once_s: float) -> bool:
        """Tell whether a warm-up and the fewest repeats of a point that takes ``once_s`` fit into what is left."""
        return (1 + FEWEST_REPEATS) * once_s <= self.left_s

    def spend(self, seconds: float) -> None:
        """Count a point that was measured."""
        self.left_s -= seconds
        self.num_points -= 1


def work(settings: Settings, device: torch.device, report: Report) -> list[Row]:
    """Time all collectives; return a row for each, of sizes and seconds."""
    comm = GroupComm()
    left_s, rows = settings["seconds"], []
    for place, op in enumerate(OPS):
        sizes = sizes_of(op, settings["sizes"], comm.world_size)
        budget = Budget(max(0.0, left_s) / (len(OPS) - place), len(sizes), settings["repeats"])
        given_s = budget.left_s
        points = measure_op(op, sizes, comm, device, budget, report)
        left_s -= given_s - budget.left_s  # what an operation saved is for those after it
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
    op: Op, sizes: Sequence[int], comm: GroupComm, device: torch.device, budget: Budget, report: Report
) -> list[tuple[float, float]]:
    """Return the points (size, median seconds) of a collective over rising sizes.

    A large size that the budget does not afford is left out, and with it all beyond.
    """
    points: list[tuple[float, float]] = []
    for size in sizes:
        report()
        if len(points) >= FEWEST_SIZES and not budget.affords(points[-1][1] * size / points[-1][0]):
            continue
        began = time.perf_counter()
        call = calls(op, size, comm, device)
        _timed(call, comm, device)  # connections are made here; it does not count
        once_s = slowest(time.perf_counter() - began, device)
        seconds = [_timed(call, comm, device) for _ in range(budget.repeats(once_s))]
        sent = float(comm.traffic.calls[-1][1])  # pieces of whole elements: not always as many bytes as ``size``
        if not points or sent > points[-1][0]:
            points.append((sent, statistics.median(seconds)))
        budget.spend(slowest(time.perf_counter() - began, device))
    return points


def calls(op: Op, num_bytes: int, comm: GroupComm, device: torch.device) -> Callable[[], object]:
    """Return a function that calls a collective whose size, as LinkTable counts it, is about ``num_bytes``."""
    n, numel = comm.world_size, num_bytes // ELEMENT_BYTES
    x = torch.zeros(numel, device=device)
    if op == "gather_rows":
        return partial(comm.gather_rows, x, "values")
    if op == "gather_lists":
        return partial(comm.gather_lists, x, [numel] * n, "values")
    if op == "broadcast":
        return partial(comm.broadcast_, x, 0, "values")
    if op == "scatter":
        piece = max(1, round(numel / (n - 1)))
        sizes = [0 if rank == comm.rank else piece for rank in range(n)]
        return partial(comm.scatter_lists, x.new_zeros(sum(sizes)), sizes, sizes, "values")
    return partial(comm.all_reduce_, x)


def write(rows: list[Row], options: argparse.Namespace, console: Console) -> list[Path]:
    """Write the table of the link, print it, draw it beside the file; returns the paths."""
    curves: dict[Op, Curve] = {row["op"]: Curve(sizes=row["sizes"], seconds=row["seconds"]) for row in rows}
    world_size, backend = rows[0]["world_size"], rows[0]["backend"]
    link = options.link or f"{backend}, {world_size} ranks"
    found = LinkTable(world_size=world_size, backend=backend, link=link, collectives=curves)
    found.save(options.out)
    console.print(_table(found))
    for row in rows:
        if row["sizes"][-1] < 0.9 * row["largest_asked"]:
            console.print(
                f"{row['op']}: nothing above {row['sizes'][-1]:,.0f} of {row['largest_asked']:,} bytes was measured "
                f"within its share of {options.seconds:g} s; raise --seconds for more"
            )
    numbers = numbers_of(curves.items(), "op", "bytes")
    labels: dict[str, str] = {op: f"{op} ({BYTES_OF[op]})" for op in curves}
    figure = draw_curves(numbers, labels, f"Collectives: {link}; lines are fits", "bytes")
    return [options.out, *save(figure, numbers, options.out.with_suffix(""))]


def _timed(call: Callable[[], object], comm: GroupComm, device: torch.device) -> float:
    """Return the seconds that the slowest rank takes."""
    dist.barrier()
    started = comm.now(device)
    call()
    return slowest(float(comm.now(device) - started), device)


def _table(found: LinkTable) -> Table:
    table = Table(title=f"{found.link}: alpha + beta x bytes, and the measured ends")
    for column in (
        "collective",
        "alpha ms",
        "beta ns/B",
        "largest error",
        "least ms",
        "at bytes",
        "most ms",
        "at bytes",
    ):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for op, curve in found.collectives.items():
        ends = [
            text
            for size, seconds in ((curve.sizes[0], curve.seconds[0]), (curve.sizes[-1], curve.seconds[-1]))
            for text in (f"{1e3 * seconds:.4g}", f"{size:,.0f}")
        ]
        table.add_row(op, f"{1e3 * curve.alpha_s:.4g}", f"{1e9 * curve.beta_s:.4g}", f"{curve.error:.0%}", *ends)
    return table
