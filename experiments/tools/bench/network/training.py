"""Train in different ways, one after another, on a rank of ``bench network``."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import micro
from experiments.config.builders import build_reducer
from experiments.config.schema import TrainConfig
from experiments.planning.schedules.base import Plan
from experiments.tools.bench.network.ways import DDP, FP16, config_of
from experiments.tools.profile.backward import endless_batches
from experiments.tools.ranks.measures import Row
from experiments.training.bucketing import bucket_caps
from experiments.training.ddp_workers import DdpWorkers
from experiments.training.optimizers import zero_gradients_
from experiments.training.round_workers import RoundWorkers
from experiments.training.tasks import load_task
from experiments.training.workers import Reduced, Workers
from micro.kernels import preparing

CPU = torch.device("cpu")


class PlainTraining:
    """A model in DDP that exchanges gradients after each batch, and the same step without communication."""

    def __init__(self, method: str, config: TrainConfig, plan: Plan | None) -> None:
        self._task = load_task(config, CPU)
        self._batches = endless_batches(self._task)
        model = self._task.model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
        self._attachment: micro.Attachment | None = None
        # Without the broadcast of batch norm buffers, for every method: only gradients are sent.
        wrap = partial(DistributedDataParallel, model, broadcast_buffers=False, gradient_as_bucket_view=True)
        if method in (DDP, FP16):
            self._ddp = wrap()
            if method == FP16:
                self._ddp.register_comm_hook(None, fp16_compress_hook)
            ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
            numel = sum(parameter.numel() for parameter in model.parameters())
            sent = ring * numel * (2 if method == FP16 else 4)
            self._bytes_sent: Callable[[], float] = lambda: sent
        else:
            preparing.prepare()
            self._ddp = wrap(**bucket_caps(config, model, plan))
            attachment = self._attachment = micro.attach(self._ddp, build_reducer(config), timed=config.timed)
            self._bytes_sent = lambda: sum(stats.bytes_sent for stats in attachment.stats)

    def take(self) -> Row:
        """Train until an exchange has ended; return its seconds, bytes of this rank, and computation of a batch."""
        seconds, sent = self._step(), self._bytes_sent()
        dist.barrier()
        (group,) = self._optimizer.param_groups
        lr, group["lr"] = group["lr"], 0.0
        with self._ddp.no_sync():
            compute_s = self._step()
        group["lr"] = lr
        return {"seconds": seconds, "sent": sent, "calls": 0, "compute_s": compute_s}

    def close(self) -> None:
        """Release its resources."""
        if self._attachment:
            self._attachment.close()

    def _step(self) -> float:
        started = time.perf_counter()
        zero_gradients_(self._optimizer)
        self._task.loss(self._ddp, next(self._batches))[0].backward()
        self._optimizer.step()
        return time.perf_counter() - started


class HarnessTraining:
    """A training of the harness with several batches per exchange, without records on disk."""

    def __init__(self, config: TrainConfig) -> None:
        task = load_task(config, CPU)
        self._config, self._step = config, 0
        self._workers: Workers = RoundWorkers(config, task) if config.rounds.every else DdpWorkers(config, task)

    def take(self) -> Row:
        """Train until an exchange has ended; return its seconds, bytes of this rank, and computation of a batch."""
        started = time.perf_counter()
        steps = [self._take_step() for _ in range(self._config.rounds.every or 1)]
        seconds = time.perf_counter() - started
        stats = [each for step in steps for each in step.stats]
        return {
            "seconds": seconds,
            "sent": sum(each.bytes_sent for each in stats),
            "calls": sum(each.num_collectives for each in stats),
            "compute_s": sum(step.compute_s for step in steps) / (len(steps) * self._config.accumulate),
        }

    def close(self) -> None:
        """Release its resources."""
        self._workers.close()

    def _take_step(self) -> Reduced:
        epoch, index = divmod(self._step, self._workers.num_steps)
        if index == 0:
            self._workers.start_epoch(epoch)
        self._step += 1
        return self._workers.take_step(self._step - 1, self._config.lr)


_training: PlainTraining | HarnessTraining | None = None  # this rank's training, kept between calls


def begin(method: str, words: list[str], plan: Plan | None, is_plain: bool) -> None:
    """Begin training in a new way on this rank, replacing the previous one."""
    global _training
    if _training:
        _training.close()
    _training = None  # first free its memory
    config = config_of(words, dist.get_world_size())
    _training = PlainTraining(method, config, plan) if is_plain else HarnessTraining(config)


def take(number: int) -> list[Row]:
    """Train for ``number`` exchanges; return the measurements of each."""
    assert _training
    rows = []
    for _ in range(number):
        dist.barrier()
        rows.append(_training.take())
    dist.barrier()
    return rows
