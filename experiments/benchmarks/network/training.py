"""Training by one method after another on a rank of ``bench network``, beside the same step without communication."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import micro
from experiments.config.builders import build_reducer
from experiments.config.schema import TrainConfig
from experiments.profiles.backward import endless_batches
from experiments.training.bucketing import bucket_caps
from experiments.training.optimizers import zero_gradients_
from experiments.training.preflight import prepare_runs
from experiments.training.tasks import load_task
from micro import kernels
from micro.planning.schedules.base import Plan

DDP, FP16 = "ddp", "torch_fp16"  # torch's own; everything else is ours
CPU = torch.device("cpu")
Wrapped = tuple[DistributedDataParallel, Callable[[], float], micro.Attachment | None]


def config_of(method: str, overrides: list[str], world_size: int) -> TrainConfig:
    """Return the configuration of a training by a method: torch's own take dense's.

    Raises:
        UserError: words that describe no training.
    """
    sparsifier = "dense" if method in (DDP, FP16) else method
    settled = ["cluster=local", f"cluster.nproc_per_node={world_size}", "output=unused", "optimizer.momentum=0"]
    (config,) = prepare_runs([[*overrides, f"sparsifier={sparsifier}", *settled]], joined_world_size=world_size)
    return config


class Training:
    """A model in training with one way to reduce its gradients."""

    def __init__(self, method: str, overrides: list[str], plan: Plan | None) -> None:
        config = config_of(method, overrides, dist.get_world_size())
        self._task = load_task(config, CPU)
        self._batches = endless_batches(self._task)
        model = self._task.model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
        self._ddp, self._bytes_sent, self._attachment = _wrapped(method, config, model, plan)

    def step(self) -> tuple[float, float]:
        """Train one step; return its seconds and the bytes that this rank sent, as its method counts them."""
        return self._step(), self._bytes_sent()

    def compute(self) -> float:
        """Take a step that sends nothing and leaves the weights as they are; return its seconds."""
        (group,) = self._optimizer.param_groups
        lr, group["lr"] = group["lr"], 0.0
        with self._ddp.no_sync():
            seconds = self._step()
        group["lr"] = lr
        return seconds

    def close(self) -> None:
        """Give back the thread and the process group of the method, if it has some."""
        if self._attachment is not None:
            self._attachment.close()

    def _step(self) -> float:
        started = time.perf_counter()
        zero_gradients_(self._optimizer)
        self._task.loss(self._ddp, next(self._batches))[0].backward()
        self._optimizer.step()
        return time.perf_counter() - started


def _wrapped(method: str, config: TrainConfig, model: nn.Module, plan: Plan | None) -> Wrapped:
    """Return the model in DDP with a method, what counts the bytes of a step, and what is attached."""
    # Without the broadcast of batch norm's buffers, the same for every method: the link carries gradients alone.
    wrap = partial(DistributedDataParallel, model, broadcast_buffers=False, gradient_as_bucket_view=True)
    if method in (DDP, FP16):
        ddp, element_bytes = wrap(), 4
        if method == FP16:
            ddp.register_comm_hook(None, fp16_compress_hook)
            element_bytes = 2
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        numel = sum(parameter.numel() for parameter in model.parameters())
        return ddp, lambda: ring * element_bytes * numel, None
    kernels.prepare()
    ddp = wrap(**bucket_caps(config, model, plan))
    attachment = micro.attach(ddp, build_reducer(config), timed=config.timed)
    return ddp, lambda: sum(stats.bytes_sent for stats in attachment.stats), attachment


_training: Training | None = None  # of this rank: it lasts from one call to the next


def begin(method: str, overrides: list[str], plan: Plan | None) -> None:
    """Begin to train by a method on this rank, instead of the one before."""
    global _training
    if _training:
        _training.close()
    _training = None  # frees its memory first
    _training = Training(method, overrides, plan)


def take(number: int) -> dict[str, list[float]]:
    """Train some steps, beside each one without communication; return the seconds of both, and the bytes sent."""
    assert _training
    steps, sent, compute = [], [], []
    for _ in range(number):
        dist.barrier()
        seconds, num_bytes = _training.step()
        dist.barrier()
        steps.append(seconds)
        sent.append(num_bytes)
        compute.append(_training.compute())
    dist.barrier()
    return {"steps": steps, "bytes": sent, "compute": compute}
