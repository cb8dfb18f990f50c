"""What drawing a batch costs beside the step that it is for: one worker, forward and backward without any exchange.

Batches are gathered, augmented and normalised (images), cut out (text) or drawn with their negatives (interactions) in
the training process itself, so what they take is time lost; it should be less than a twentieth of a step.
"""

import argparse
import statistics
import time
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from experiments.config.command_line import add_settings
from experiments.config.option_types import whole_number
from experiments.config.schema import TrainConfig
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from experiments.training.preflight import prepare_runs
from experiments.training.tasks import load_task

NAME = "loading"
WARMUP = 2
WORKLOADS: dict[str, list[str]] = {  # batches of the recipes at the papers' scale, models and data that need no file
    "ResNet-18, images of 32 x 32": [
        *("model=resnet18", "dataset=synthetic", "dataset.augment=crop_flip", "batch_size=32"),
        "dataset.settings={num_samples: 4096, image_size: 32, channels: 3, num_classes: 10}",
    ],
    "ResNet-8, images of 32 x 32": [
        *("model=resnet8", "dataset=synthetic", "dataset.augment=crop_flip", "batch_size=16"),
        "dataset.settings={num_samples: 4096, image_size: 32, channels: 3, num_classes: 10}",
    ],
    "LSTM 3 x 650, text": ["model=lstm", "dataset=manuals", "batch_size=32", "dataset.sequence_length=30"],
    "CNN-LSTM, text": ["model=cnn_lstm", "dataset=manuals", "batch_size=20", "dataset.sequence_length=35"],
    "BERT of 2 layers, masked text": ["model=bert_tiny", "dataset=manuals", "batch_size=8"],
    "NeuMF, pairs, small batch": ["model=neumf_small", "dataset=latent", "batch_size=1000"],
    "NeuMF, pairs": ["model=neumf", "dataset=latent", "batch_size=10000"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--steps", type=whole_number(), default=10, help="steps that count, after a warm-up")
    add_settings(parser, help="one workload, as for train; all when left out")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    workloads = {"as given": arguments.overrides} if arguments.overrides else WORKLOADS
    fixed = ["cluster=simulated", "cluster.world_size=1", "sparsifier=dense"]
    configs = prepare_runs([[*words, *fixed] for words in workloads.values()])
    rows = [
        {"workload": name, **measured(config, arguments.steps)} for name, config in zip(workloads, configs, strict=True)
    ]
    table = Table("workload", "batch", "draw ms", "step ms", "share %")
    for row in rows:
        figures = (1e3 * row["draw_s"], 1e3 * row["step_s"], 100 * row["share"])
        table.add_row(row["workload"], str(row["batch_size"]), *(f"{value:.3g}" for value in figures))
    console.print(table)
    write_or_rescue(lambda out: [write_csv(pd.DataFrame(rows), out / "loading.csv")], arguments.out)


def measured(config: TrainConfig, num_steps: int) -> dict[str, Any]:
    """Return the medians of drawing a batch and of the whole step, and the share of the first in the second."""
    task = load_task(config, torch.device("cpu"))
    batches, carry, epoch = task.batches(0), None, 0
    drawing = batches.epoch(epoch)
    times = []
    for _ in range(WARMUP + num_steps):
        started = time.perf_counter()
        batch = next(drawing, None)
        if batch is None:  # a new epoch shuffles: that is part of drawing too
            epoch, carry = epoch + 1, None
            drawing = batches.epoch(epoch)
            batch = next(drawing)
        drawn = time.perf_counter()
        loss, carry = task.loss(task.model, batch, carry)
        loss.backward()
        task.model.zero_grad()
        times.append((drawn - started, time.perf_counter() - started))
    draw_s, step_s = (statistics.median(column) for column in zip(*times[WARMUP:], strict=True))
    return {"batch_size": config.batch_size, "draw_s": draw_s, "step_s": step_s, "share": draw_s / step_s}
