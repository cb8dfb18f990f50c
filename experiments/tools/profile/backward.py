"""Measure when backward completes each gradient and forward needs each parameter, without communication.

Every rank trains the configured model on its share of the data; all start each step together, and nothing is reduced.
Times are medians over steps, then over ranks.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from experiments.config.command_line import add_settings
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.planning.traces import Layer, Trace
from experiments.tools.profile.on_ranks import device_name
from experiments.tools.ranks.measures import Row, Settings, own_device
from experiments.tools.shared.markdown import table
from experiments.tools.shared.options import whole_number
from experiments.training.optimizers import build_optimizer
from experiments.training.preflight import prepare_runs
from experiments.training.tasks import Batch, Task, load_task
from micro.comm.objects import gather_objects

NAME = "backward"
WARMUP = 3
DIGITS = 9  # no clock resolves less than a nanosecond
IMAGES = [  # data sets of CIFAR's size, without a file
    "model=resnet20",
    "dataset=synthetic",
    "dataset.settings={num_samples: 4096, image_size: 32, channels: 3, num_classes: 10}",
    "batch_size=32",
]
SETTLED = ("sparsifier", "schedule", "density", "cluster", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    help = "measured steps, after a warm-up (%(default)s)"
    parser.add_argument("--steps", type=whole_number(), default=20, help=help)
    help = "model, dataset and so on, as for train; ResNet-20 on drawn 32 x 32 images when none is given"
    add_settings(parser, help=help)


def prepare(options: argparse.Namespace, world_size: int) -> Settings:
    """Return the settings of the ranks.

    Raises:
        UserError: invalid words, or a setting that this command fixes.
    """
    for word in options.overrides:
        if word.split("=")[0].split(".")[0] in SETTLED:
            raise UserError(f"'{word}': nothing is communicated or written as a run here, leave it out")
    overrides = options.overrides or IMAGES
    _config(overrides, world_size)
    return {"overrides": overrides, "steps": options.steps}


def work(settings: Settings) -> list[Row]:
    """Time the steps of this rank; return a row per rank: the seconds of its steps, and properties of the model."""
    config, device = _config(settings["overrides"], dist.get_world_size()), own_device()
    task = load_task(config, device)
    batches = endless_batches(task)
    optimizer = build_optimizer(config.optimizer, task.model, config.lr)
    watched = Watched(task.model, device)
    steps = []
    for step in range(WARMUP + settings["steps"]):
        batch = next(batches)
        task.seed(step, dist.get_rank())
        dist.barrier()  # ranks compete for the machine, as in synchronous training
        steps.append(watched.step(lambda model, batch=batch: task.loss(model, batch)[0], optimizer))  # type: ignore[misc]
    trained = dict(_trained(task.model))
    row = {
        "model": config.model.name,
        "batch_size": config.batch_size,
        "device": device_name(device),
        "num_bytes": {name: p.numel() * p.element_size() for name, p in trained.items()},
        "shapes": {name: tuple(p.shape) for name, p in trained.items()},
        "element_bytes": min(p.element_size() for p in trained.values()),
        "steps": steps[WARMUP:],
    }
    return list(gather_objects(row))  # type: ignore[arg-type]


def merge(rows: Sequence[Row]) -> Trace:
    """Return the trace of the ranks' rows (see ``work``): the median over the steps of a rank, then over ranks.

    Raises:
        UserError: the order of gradients differs, or a parameter gets none.
    """
    first, order = rows[0], _common_order(rows)

    def median(kind: str, name: str) -> float:
        of_ranks = [statistics.median(step[kind][name] for step in row["steps"]) for row in rows]
        return round(statistics.median(of_ranks), DIGITS)

    used = {name: median("used", name) for name in order if all(name in s["used"] for r in rows for s in r["steps"])}
    ready = list(itertools.accumulate((median("ready", name) for name in order), max))
    layers = [
        Layer(name, first["num_bytes"][name], ready_s, used.get(name), first["shapes"][name])
        for name, ready_s in zip(order, ready, strict=True)
    ]
    return Trace(
        model=first["model"],
        layers=tuple(layers),
        forward_s=median("lengths", "forward_s"),
        backward_s=max(median("lengths", "backward_s"), ready[-1]),
        update_s=median("lengths", "update_s"),
        element_bytes=first["element_bytes"],
        batch_size=first["batch_size"],
        world_size=len(rows),
        device=first["device"],
        num_steps=len(first["steps"]),
    )


def write(rows: list[Row], options: argparse.Namespace, console: Console) -> list[Path]:
    """Write the trace and print its content; return the paths. Raises: UserError: as `merge`."""
    trace = merge(rows)
    trace.save(options.out)
    title = f"{trace.model}, batch {trace.batch_size}, ranks: {trace.world_size}, medians of {trace.num_steps} steps"
    times = [f"{1e3 * seconds:.2f}" for seconds in (trace.forward_s, trace.backward_s, trace.update_s)]
    cells = [f"{len(trace.layers)}", f"{trace.numel:,}", f"{trace.num_bytes / 1e6:.2f}", *times]
    columns = ["tensors", "parameters", "MB", "forward ms", "backward ms", "update ms"]
    console.print(f"{title}\n\n{table(columns, [cells])}", soft_wrap=True, highlight=False)
    return [options.out]


def _common_order(rows: Sequence[Row]) -> list[str]:
    """Return the order of gradients, equal on all ranks and in all steps."""
    order = list(rows[0]["steps"][0]["ready"])
    for rank, row in enumerate(rows):
        for step, seconds in enumerate(row["steps"]):
            for place, (one, other) in enumerate(itertools.zip_longest(order, seconds["ready"], fillvalue="nothing")):
                if one != other:
                    raise UserError(
                        f"gradient {place} of backward is '{one}' on rank 0 in step 0 and '{other}' on rank {rank} in "
                        f"step {step}: a trace needs a model whose gradients always come in one order"
                    )
    missing = [name for name in rows[0]["num_bytes"] if name not in order]
    if missing:
        raise UserError(f"parameter '{missing[0]}' gets no gradient: freeze it or take it out of the model")
    return order


class Watched:
    """A model with hooks that record when a parameter is first used and when its gradient is complete.

    Time stamps are clock readings, or events of the current stream of the forward pass.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._used: dict[str, Any] = {}
        self._ready: dict[str, Any] = {}
        names = {parameter: name for name, parameter in _trained(model)}
        for parameter, name in names.items():
            parameter.register_post_accumulate_grad_hook(partial(self._stamp, self._ready, [name]))
        for module in model.modules():
            own = [names[parameter] for parameter in module.parameters(recurse=False) if parameter in names]
            if own:
                module.register_forward_pre_hook(partial(self._stamp, self._used, own))

    def step(self, loss_of: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer) -> Row:
        """Train one step; return seconds: ready and used by parameter, ready in order, and durations of the parts.

        Args:
            loss_of: maps the model to the loss of a batch.
        """
        self._used.clear()
        self._ready.clear()
        optimizer.zero_grad()
        started = self.now()
        loss = loss_of(self._model)
        forwarded = self.now()
        loss.backward()
        done = self.now()
        optimizer.step()
        updated = self.now()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        parts = {"forward_s": (started, forwarded), "backward_s": (forwarded, done), "update_s": (done, updated)}
        return {
            "ready": {name: self.seconds(forwarded, stamp) for name, stamp in self._ready.items()},
            "used": {name: self.seconds(started, stamp) for name, stamp in self._used.items()},
            "lengths": {name: self.seconds(*part) for name, part in parts.items()},
        }

    def now(self) -> Any:
        """Return a time stamp, without waiting for the device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds between two time stamps, after the work between them is done."""
        return first.elapsed_time(second) / 1e3 if self._device.type == "cuda" else second - first

    def _stamp(self, stamps: dict[str, Any], names: Sequence[str], *_: Any) -> None:
        stamp = self.now()
        for name in names:
            stamps.setdefault(name, stamp)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def endless_batches(task: Task) -> Iterator[Batch]:
    """Yield this rank's batches, epoch after epoch."""
    batches = task.batches(dist.get_rank())
    return itertools.chain.from_iterable(batches.epoch(epoch) for epoch in itertools.count())


def _config(overrides: list[str], world_size: int) -> TrainConfig:
    settled = ["sparsifier=dense", "output=unused", "cluster=local", f"cluster.nproc_per_node={world_size}"]
    (config,) = prepare_runs([[*overrides, *settled]], joined_world_size=world_size)
    return config
