"""A training step of the harness against a bare PyTorch loop with DDP, both dense.

Both train the same model on the same batches in the same processes, a few steps of one, then as many of the other, so
that a machine that slows down slows both; which comes first changes from pair to pair. What the harness adds is its
hook, its statistics and a record per step. With the defaults it takes one to two minutes on two idle cores.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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
from experiments.ranks.group import measuring_ranks
from experiments.ranks.measures import own_device
from experiments.runs.run_folder import RunFolder
from experiments.training.ddp_workers import DdpWorkers
from experiments.training.loop import Trainer
from experiments.training.optimizers import build_optimizer
from experiments.training.preflight import prepare_runs
from experiments.training.tasks import load_task

NAME = "loop"
BLOCK = 5  # steps of one loop before the other's turn: caches are as warm as in a training, nearly
FEWEST_PAIRS = 2
DEFAULTS = [  # images of CIFAR's size that need no file
    "model=resnet20",
    "dataset=synthetic",
    "dataset.settings={num_samples: 4096, image_size: 32, channels: 3, num_classes: 10}",
    "batch_size=32",
]
FIXED = ["sparsifier=dense", "epochs=1000", "output=unused", "checkpoint.every_s=0", "checkpoint.every_steps=0"]
COLUMNS: Columns = {
    "training": Column("run"),
    "harness ms": Column("harness_s", "{:.2f}", 1e3),
    "bare ms": Column("bare_s", "{:.2f}", 1e3),
    "ratio": Column("ratio", "{:.3f}"),
    "middle half": Column("ratio_half"),
    "pairs": Column("num_pairs", "{:.0f}"),
}
Pair = tuple[float, float]  # seconds of a step of the harness and of the bare loop, means over a block


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--nproc", type=whole_number(1, MOST_ON_A_MACHINE), default=2, help="ranks")
    parser.add_argument(
        "--steps", type=whole_number(), default=200, help="of each loop that count, after a warm-up (%(default)s)"
    )
    add_settings(parser, help="model, dataset and so on, as for train; ResNet-20 on 32 x 32 images when none is given")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    (config,) = prepare_runs(
        [[*(arguments.overrides or DEFAULTS), *FIXED, f"cluster.nproc_per_node={arguments.nproc}"]]
    )
    num_pairs = max(FEWEST_PAIRS, math.ceil(arguments.steps / BLOCK))
    with (
        tempfile.TemporaryDirectory(prefix="micro-loop-") as folder,
        measuring_ranks(arguments.nproc) as ranks,
        console.status("measuring"),
    ):
        ranks.call(begin, config, folder)
        pairs = [slowest(ranks.call(take_pair)) for _ in range(num_pairs)]
    ratios = [ours / theirs for ours, theirs in pairs]
    row = {
        "run": f"{config.model.name} on {config.dataset.name}, batch {config.batch_size}, {arguments.nproc} ranks",
        "harness_s": statistics.median(ours for ours, _ in pairs),
        "bare_s": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "ratio_half": tables.middle_half(ratios),
        "num_pairs": len(pairs),
    }
    frame = pd.DataFrame([row])
    tables.write(frame, "A step of the training loop", [tables.table(frame, COLUMNS)], arguments, console)


def slowest(answers: Sequence[Pair]) -> Pair:
    """Return the seconds of both loops on their slowest rank."""
    ours, theirs = zip(*answers, strict=True)
    return max(ours), max(theirs)


class _Loops:
    """Both loops on this rank, at the same step."""

    def __init__(self, config: TrainConfig, folder: str) -> None:
        self._device = own_device()
        self._workers = DdpWorkers(config, load_task(config, self._device))
        self._harness = Trainer(config, self._workers, RunFolder(Path(folder)))
        self._bare = _BareLoop(config, self._device)
        self._num_pairs = 0

    def take_pair(self) -> Pair:
        """Take a block of steps of each, in turn first; return the seconds of a step."""
        numbers = range(self._num_pairs * BLOCK, (self._num_pairs + 1) * BLOCK)
        loops = [(self._harness.step, self._workers.start_epoch), (self._bare.step, self._bare.start_epoch)]
        seconds = {turn: self._block(*loops[turn], numbers) for turn in (range(2) if self._num_pairs % 2 else (1, 0))}
        self._num_pairs += 1
        return seconds[0], seconds[1]

    def _block(
        self, step: Callable[[int, int], float], start_epoch: Callable[[int], None], numbers: Sequence[int]
    ) -> float:
        dist.barrier()
        started = time.perf_counter()
        for number in numbers:
            epoch, index = divmod(number, self._workers.num_steps)
            if index == 0:
                start_epoch(epoch)
            step(epoch, index)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return (time.perf_counter() - started) / len(numbers)


class _BareLoop:
    """What a user would write without us."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self._task = load_task(config, device)
        self._batches = self._task.batches(dist.get_rank())
        device_ids = [device] if device.type == "cuda" else None
        self._model = DistributedDataParallel(self._task.model, device_ids=device_ids, gradient_as_bucket_view=True)
        self._optimizer = build_optimizer(config.optimizer, self._task.model, config.lr)

    def start_epoch(self, epoch: int) -> None:
        self._epoch = self._batches.epoch(epoch)

    def step(self, epoch: int, index: int) -> float:
        inputs, targets = next(self._epoch)
        self._optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._model(inputs), targets)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


_loops: _Loops | None = None  # of this rank: it lasts from one call to the next


def begin(config: TrainConfig, folder: str) -> None:
    """Make both loops on this rank, and warm them up."""
    global _loops
    _loops = _Loops(config, folder)
    _loops.take_pair()


def take_pair() -> Pair:
    """Take a block of steps of each loop on this rank."""
    assert _loops
    return _loops.take_pair()
