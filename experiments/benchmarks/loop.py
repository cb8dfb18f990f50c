"""A training step of the harness against a bare PyTorch loop with DDP, both dense.

Both train the same model on the same batches in the same processes, step by step in turn, so that a machine that slows
down slows both. What the harness adds is its hook, its statistics and a record per step.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from experiments.config.command_line import add_settings
from experiments.config.option_types import whole_number
from experiments.config.ranges import MOST_ON_A_MACHINE
from experiments.config.schema import TrainConfig
from experiments.launching.measurements import Row, Settings, measure, own_device, slowest
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from experiments.runs.run_folder import RunFolder
from experiments.training.ddp_workers import DdpWorkers
from experiments.training.loop import Trainer
from experiments.training.optimizers import build_optimizer
from experiments.training.preflight import prepare_runs
from experiments.training.tasks import load_task

NAME = "loop"
WARMUP = 3
DEFAULTS = [  # images of CIFAR's size that need no file
    "model=resnet20",
    "dataset=synthetic",
    "dataset.settings={num_samples: 4096, image_size: 32, channels: 3, num_classes: 10}",
    "batch_size=32",
]
FIXED = ["sparsifier=dense", "epochs=1000", "output=unused", "checkpoint.every_s=0", "checkpoint.every_steps=0"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--nproc", type=whole_number(1, MOST_ON_A_MACHINE), default=2, help="ranks")
    parser.add_argument("--steps", type=whole_number(), default=40, help="pairs of steps that count, after a warm-up")
    add_settings(parser, help="model, dataset and so on, as for train; ResNet-20 on 32 x 32 images when none is given")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    (config,) = prepare_runs(
        [[*(arguments.overrides or DEFAULTS), *FIXED, f"cluster.nproc_per_node={arguments.nproc}"]]
    )
    with tempfile.TemporaryDirectory(prefix="micro-loop-") as folder:
        settings = {"config": config, "folder": folder, "steps": arguments.steps}
        (row,) = measure(work, settings, arguments.nproc)
    name = f"{config.model.name} on {config.dataset.name}, batch {config.batch_size}, {arguments.nproc} ranks"
    console.print(
        f"{name}: harness {1e3 * row['harness_s']:.2f} ms, bare DDP {1e3 * row['bare_s']:.2f} ms a step; "
        f"ratio {row['ratio']:.3f} (quartiles {row['ratio_q1']:.3f} to {row['ratio_q3']:.3f}, {arguments.steps} pairs)"
    )
    frame = pd.DataFrame([row]).assign(run=name)
    write_or_rescue(lambda out: [write_csv(frame, out / "loop.csv")], arguments.out)


def work(settings: Settings) -> list[Row]:
    """Time pairs of steps and return one row of medians."""
    config: TrainConfig = settings["config"]
    device, folder = own_device(), RunFolder(Path(settings["folder"]))
    workers = DdpWorkers(config, load_task(config, device))
    harness, bare = Trainer(config, workers, folder), _BareLoop(config, device)
    pairs = []
    index = epoch = 0
    for pair in range(WARMUP + settings["steps"]):
        if index == 0:
            workers.start_epoch(epoch)
            bare.start_epoch(epoch)
        order = (harness.step, bare.step) if pair % 2 else (bare.step, harness.step)
        times = {step: _timed(step, epoch, index, device) for step in order}
        pairs.append((times[harness.step], times[bare.step]))
        index = (index + 1) % workers.num_steps
        epoch += index == 0
    counted = pairs[WARMUP:]
    ratios = sorted(ours / theirs for ours, theirs in counted)
    quartiles = statistics.quantiles(ratios, n=4)
    return [
        {
            "harness_s": statistics.median(ours for ours, _ in counted),
            "bare_s": statistics.median(theirs for _, theirs in counted),
            "ratio": statistics.median(ratios),
            "ratio_q1": quartiles[0],
            "ratio_q3": quartiles[2],
        }
    ]


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


def _timed(step: Any, epoch: int, index: int, device: torch.device) -> float:
    dist.barrier()
    started = time.perf_counter()
    step(epoch, index)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return slowest(time.perf_counter() - started, device)
