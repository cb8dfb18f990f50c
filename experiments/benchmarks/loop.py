"""A training step of the harness against a bare PyTorch loop with DDP, both dense.

Both train the same model on the same batches in the same processes, a few steps of one, then as many of the other, so
that a machine that slows down slows both; which comes first changes from pair to pair. What the harness adds is its
hook, its statistics and a record per step. With the defaults it takes one to two minutes on two idle cores.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from experiments.benchmarks import tables
from experiments.benchmarks.tables import Column, Columns
from experiments.config.command_line import add_settings
from experiments.config.option_types import whole_number
from experiments.config.ranges import MOST_ON_A_MACHINE
from experiments.config.schema import TrainConfig
from experiments.profiles.backward import IMAGES, endless_batches
from experiments.ranks.group import measuring_ranks
from experiments.ranks.measures import Row, own_device
from experiments.runs.run_folder import RunFolder
from experiments.training.ddp_workers import DdpWorkers
from experiments.training.loop import Trainer
from experiments.training.optimizers import build_optimizer
from experiments.training.preflight import prepare_runs
from experiments.training.tasks import load_task

NAME = "loop"
BLOCK = 5  # steps of one loop before the other's turn: caches are as warm as in a training, nearly
FEWEST_PAIRS = 2
FIXED = ["sparsifier=dense", "epochs=1000", "output=unused", "checkpoint.every_s=0", "checkpoint.every_steps=0"]
COLUMNS: Columns = {
    "training": Column("run"),
    "harness ms": Column("harness_s", "{:.2f}", 1e3),
    "bare ms": Column("bare_s", "{:.2f}", 1e3),
    "ratio": Column("ratio", "{:.3f}"),
    "middle half": Column("ratio_half"),
    "pairs": Column("num_pairs", "{:.0f}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add, help = parser.add_argument, "of each loop that count, after a warm-up (%(default)s)"
    add("--nproc", type=whole_number(1, MOST_ON_A_MACHINE), default=2, help="ranks")
    add("--steps", type=whole_number(), default=200, help=help)
    add_settings(parser, help="model, dataset and so on, as for train; ResNet-20 on 32 x 32 images when none is given")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    (config,) = prepare_runs([[*(arguments.overrides or IMAGES), *FIXED, f"cluster.nproc_per_node={arguments.nproc}"]])
    num_pairs = max(FEWEST_PAIRS, math.ceil(arguments.steps / BLOCK))
    with (
        tempfile.TemporaryDirectory(prefix="micro-loop-") as folder,
        measuring_ranks(arguments.nproc) as ranks,
        console.status("measuring"),
    ):
        pairs = pd.DataFrame(tables.slowest_of(ranks.call(measure, config, folder, num_pairs)))
    pairs["ratio"] = pairs["harness_s"] / pairs["bare_s"]
    row = {
        "run": f"{config.model.name} on {config.dataset.name}, batch {config.batch_size}, {arguments.nproc} ranks",
        **pairs.median(),
        "ratio_half": tables.middle_half(pairs["ratio"].tolist()),
        "num_pairs": len(pairs),
    }
    frame = pd.DataFrame([row])
    tables.write(frame, "A step of the training loop", [tables.table(frame, COLUMNS)], arguments, console)


def measure(config: TrainConfig, folder: str, num_pairs: int) -> list[Row]:
    """Take blocks of steps of each loop on this rank, in turn first, after one to warm up; return seconds of a step."""
    device = own_device()
    workers = DdpWorkers(config, load_task(config, device))
    trainer = Trainer(config, workers, RunFolder(Path(folder)))
    bare = bare_step(config, device)

    def harness(number: int) -> None:
        epoch, index = divmod(number, workers.num_steps)
        if index == 0:
            workers.start_epoch(epoch)
        trainer.step(epoch, index)

    rows, loops = [], [("harness_s", harness), ("bare_s", bare)]
    for pair in range(1 + num_pairs):
        numbers = range(pair * BLOCK, (pair + 1) * BLOCK)
        rows.append({name: _seconds(step, numbers, device) for name, step in loops})
        loops.reverse()
    return rows[1:]


def _seconds(step: Callable[[int], None], numbers: range, device: torch.device) -> float:
    dist.barrier()
    started = time.perf_counter()
    for number in numbers:
        step(number)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / len(numbers)


def bare_step(config: TrainConfig, device: torch.device) -> Callable[[int], None]:
    """Return the step of a loop that a user would write without us."""
    task = load_task(config, device)
    batches = endless_batches(task)
    device_ids = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(task.model, device_ids=device_ids, gradient_as_bucket_view=True)
    optimizer = build_optimizer(config.optimizer, task.model, config.lr)

    def step(_number: int) -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        float(loss.detach())

    return step
