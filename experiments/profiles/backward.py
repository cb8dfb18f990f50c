"""When backward completes each gradient, and when forward needs each parameter, on ranks that do not communicate.

Every rank trains the configured model on its own share of the data, all start a step together, and nothing is reduced.
Times are medians over steps, then over ranks.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from experiments.config.command_line import add_settings
from experiments.config.errors import UserError
from experiments.config.option_types import whole_number
from experiments.config.schema import TrainConfig
from experiments.profiles.on_ranks import device_name
from experiments.ranks.measures import Row, Settings, own_device
from experiments.reports.markdown import table
from experiments.training.optimizers import build_optimizer
from experiments.training.preflight import prepare_runs
from experiments.training.tasks import Batch, Task, load_task
from micro.objects import gather_objects
from micro.planning.traces import Layer, Trace

NAME = "backward"
WARMUP = 3
DIGITS = 9  # no clock tells less than a nanosecond
DEFAULTS = [  # images of CIFAR's size that need no file
    "model=resnet20",
    "dataset=synthetic",
    "dataset.settings={num_samples: 1024, image_size: 32, channels: 3, num_classes: 10}",
    "batch_size=32",
]
SETTLED = ("sparsifier", "schedule", "density", "cluster", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "--steps", type=whole_number(), default=20, help="steps that count, after a warm-up (%(default)s)"
    )
    add_settings(
        parser, help="model, dataset and so on, as for train; ResNet-20 on drawn 32 x 32 images when none is given"
    )


def prepare(options: argparse.Namespace, world_size: int) -> Settings:
    """Return the settings of the ranks.

    Raises:
        UserError: words that describe no training, or that name what is settled here; too few steps.
    """
    for word in options.overrides:
        if word.split("=")[0].split(".")[0] in SETTLED:
            raise UserError(f"'{word}': nothing is communicated or written as a run here, leave it out")
    overrides = options.overrides or DEFAULTS
    _config(overrides, world_size)
    return {"overrides": overrides, "steps": options.steps}


def work(settings: Settings) -> list[Row]:
    """Time the steps of this rank; return a row for each rank: the stamps of its steps, and facts of the model."""
    config, device = _config(settings["overrides"], dist.get_world_size()), own_device()
    task = load_task(config, device)
    batches = endless_batches(task)
    optimizer = build_optimizer(config.optimizer, task.model, config.lr)
    watched = Watched(task.model, Stopwatch(device))
    steps = []
    for step in range(WARMUP + settings["steps"]):
        batch = next(batches)
        task.seed(step, dist.get_rank())
        dist.barrier()  # ranks contend for the machine as they do in training, where every step joins them
        steps.append(watched.step(partial(_loss, task, batch=batch), optimizer))
    row = {
        "model": config.model.name,
        "batch_size": config.batch_size,
        "device": device_name(device),
        "num_bytes": {name: p.numel() * p.element_size() for name, p in _trained(task.model)},
        "shapes": {name: tuple(p.shape) for name, p in _trained(task.model)},
        "element_bytes": min(p.element_size() for _, p in _trained(task.model)),
        "steps": steps[WARMUP:],
    }
    return list(gather_objects(row))  # type: ignore[arg-type]


def write(rows: list[Row], options: argparse.Namespace, console: Console) -> list[Path]:
    """Merge the ranks' rows, write the trace, print what is in it; returns the paths.

    Raises:
        UserError: gradients come in an order that changes, or do not come at all.
    """
    trace = merge(rows)
    trace.save(options.out)
    console.print(_table(trace), soft_wrap=True, highlight=False)
    return [options.out]


def merge(rows: Sequence[Row]) -> Trace:
    """Return the trace of the ranks' rows (see ``work``): the median over the steps of a rank, then over ranks.

    Raises:
        UserError: the order of gradients is not the same everywhere, or a parameter gets none.
    """
    first = rows[0]
    order = _common_order(rows)
    ready = list(itertools.accumulate((_median(rows, "ready", name) for name in order), max))
    layers = [
        Layer(name, first["num_bytes"][name], ready_s, _median_or_none(rows, "used", name), first["shapes"][name])
        for name, ready_s in zip(order, ready, strict=True)
    ]
    backward_s = _median(rows, "lengths", "backward_s")
    return Trace(
        model=first["model"],
        layers=tuple(layers),
        forward_s=_median(rows, "lengths", "forward_s"),
        backward_s=max(backward_s, ready[-1]),
        update_s=_median(rows, "lengths", "update_s"),
        element_bytes=first["element_bytes"],
        batch_size=first["batch_size"],
        world_size=len(rows),
        device=first["device"],
        num_steps=len(first["steps"]),
    )


def _common_order(rows: Sequence[Row]) -> list[str]:
    """Return the one order in which all gradients come, on all ranks and in all steps."""
    order = list(rows[0]["steps"][0]["ready"])
    for rank, row in enumerate(rows):
        for step, stamps in enumerate(row["steps"]):
            pairs = itertools.zip_longest(order, stamps["ready"], fillvalue="nothing")
            place, names = next(((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), (0, None))
            if names:
                raise UserError(
                    f"gradient {place} of backward is '{names[0]}' on rank 0 in step 0 and '{names[1]}' on rank {rank} "
                    f"in step {step}: a trace needs a model whose gradients always come in one order"
                )
    missing = [name for name in rows[0]["num_bytes"] if name not in order]
    if missing:
        raise UserError(f"parameter '{missing[0]}' gets no gradient: freeze it or take it out of the model")
    return order


def _median(rows: Sequence[Row], kind: str, name: str) -> float:
    over_ranks = statistics.median(statistics.median(step[kind][name] for step in row["steps"]) for row in rows)
    return round(over_ranks, DIGITS)


def _median_or_none(rows: Sequence[Row], kind: str, name: str) -> float | None:
    everywhere = all(name in step[kind] for row in rows for step in row["steps"])
    return _median(rows, kind, name) if everywhere else None


class Stopwatch:
    """Stamps of moments, whose distances are known after ``finish``: the clock's, or events of a GPU's stream.

    A hook runs with the stream that was current in the forward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Any:
        """Return a stamp of this moment of the work, without waiting for it."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Wait until all stamped work is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds between two stamps."""
        return first.elapsed_time(second) / 1e3 if self._device.type == "cuda" else second - first


class Watched:
    """A model whose hooks stamp when a parameter is first used and when its gradient is complete."""

    def __init__(self, model: nn.Module, stopwatch: Stopwatch) -> None:
        self._model, self._stopwatch = model, stopwatch
        self._used: dict[str, Any] = {}
        self._ready: dict[str, Any] = {}
        names = {parameter: name for name, parameter in _trained(model)}
        for parameter, name in names.items():
            parameter.register_post_accumulate_grad_hook(partial(self._stamp_ready, name))
        for module in model.modules():
            own = [names[parameter] for parameter in module.parameters(recurse=False) if parameter in names]
            if own:
                module.register_forward_pre_hook(partial(self._stamp_used, own))

    def step(self, loss_of: Any, optimizer: torch.optim.Optimizer) -> Row:
        """Train one step and return its seconds: ready and used by parameter, ready in order, and the parts' lengths.

        Args:
            loss_of: maps the model to the loss of a batch.
        """
        self._used, self._ready = {}, {}
        optimizer.zero_grad()
        watch = self._stopwatch
        started = watch.stamp()
        loss: Tensor = loss_of(self._model)
        forwarded = watch.stamp()
        loss.backward()
        done = watch.stamp()
        optimizer.step()
        updated = watch.stamp()
        watch.finish()
        return {
            "ready": {name: watch.seconds(forwarded, stamp) for name, stamp in self._ready.items()},
            "used": {name: watch.seconds(started, stamp) for name, stamp in self._used.items()},
            "lengths": {
                "forward_s": watch.seconds(started, forwarded),
                "backward_s": watch.seconds(forwarded, done),
                "update_s": watch.seconds(done, updated),
            },
        }

    def _stamp_ready(self, name: str, _: Tensor) -> None:
        self._ready[name] = self._stopwatch.stamp()

    def _stamp_used(self, names: list[str], *_: Any) -> None:
        stamp = self._stopwatch.stamp()
        for name in names:
            self._used.setdefault(name, stamp)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _loss(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    return task.loss(model, batch)[0]


def endless_batches(task: Task) -> Iterator[Batch]:
    """Yield this rank's batches, epoch after epoch."""
    batches = task.batches(dist.get_rank())
    return itertools.chain.from_iterable(batches.epoch(epoch) for epoch in itertools.count())


def _config(overrides: list[str], world_size: int) -> TrainConfig:
    settled = ["sparsifier=dense", "output=unused", "cluster=local", f"cluster.nproc_per_node={world_size}"]
    (config,) = prepare_runs([[*overrides, *settled]], joined_world_size=world_size)
    return config


def _table(trace: Trace) -> str:
    title = f"{trace.model}, batch {trace.batch_size}, ranks: {trace.world_size}, medians of {trace.num_steps} steps"
    columns = ["tensors", "parameters", "MB", "forward ms", "backward ms", "update ms"]
    times = [f"{1e3 * seconds:.2f}" for seconds in (trace.forward_s, trace.backward_s, trace.update_s)]
    cells = [f"{len(trace.layers)}", f"{trace.numel:,}", f"{trace.num_bytes / 1e6:.2f}", *times]
    return f"{title}\n\n{table(columns, [cells])}"
