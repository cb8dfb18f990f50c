"""The workers of a run, as its loop sees them: real processes, or all of them in one."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from experiments.harness.bucketing import agreed_plan, bucket_caps, check_buckets
from experiments.harness.config import TrainConfig, build_reducer
from experiments.harness.seeding import seed_step
from experiments.harness.tasks import Batch, Task
from micro import kernels
from micro.comm import GroupComm
from micro.ddp import scoped
from micro.schedules.base import Plan


@dataclass(frozen=True, slots=True)
class Reduced:
    """Gradients are reduced and wait in the parameters.

    Attributes:
        loss: of rank 0's batch.
        stats: of the step on rank 0, one per bucket.
        compute_s: seconds of forward and backward without the reduction, summed over the ranks that this process is.
        exposed_s: seconds of the reduction that backward did not hide.
    """

    loss: Tensor
    stats: tuple[micro.StepStats, ...]
    compute_s: float
    exposed_s: float


class Team(ABC):
    """All workers together. One optimizer step follows each ``reduce``."""

    task: Task
    is_main: bool
    plan: Plan | None = None  # of the buckets, where a schedule made one

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """Steps of an epoch."""

    @abstractmethod
    def start_epoch(self, epoch: int) -> None:
        """Begin to draw the batches of an epoch."""

    @abstractmethod
    def reduce(self, step: int) -> Reduced:
        """Draw a batch for each rank, compute the gradients and reduce them; they were set to zero before."""

    @abstractmethod
    def evaluate(self) -> Tensor:
        """Return (3,) sums over the whole test set: loss, correct answers, samples."""

    def close(self) -> None:  # noqa: B027 - most teams have nothing to end
        """End what the team started."""


class ProcessTeam(Team):
    """This process is one rank of a torch.distributed group; DDP drives, micro reduces."""

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.task, self._config = task, config
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0
        self._batches = task.batches(self.rank)
        self._comm = GroupComm()
        kernels.prepare()
        self.plan = agreed_plan(config, task.model, self._comm)
        self._ddp = DistributedDataParallel(
            task.model,
            device_ids=[task.device] if task.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **bucket_caps(config, task.model, self.plan),
        )
        reducer = build_reducer(config, steps_per_epoch=self.num_batches)
        self._attachment = micro.attach(self._ddp, reducer, scope=config.scope, timed=config.timed)

    @property
    def num_batches(self) -> int:
        """Steps of an epoch."""
        return self._batches.num_batches

    def start_epoch(self, epoch: int) -> None:
        """Begin to draw this rank's batches of an epoch."""
        self._epoch = self._batches.epoch(epoch)

    def reduce(self, step: int) -> Reduced:
        """Compute this rank's gradients; the hook reduces them during backward."""
        batch = next(self._epoch)
        seed_step(self._config.seed, step, self.rank, self.task.device)
        started = self._comm.now(self.task.device)
        loss = self.task.loss(self._ddp, batch)
        loss.backward()
        elapsed_s = self._comm.now(self.task.device) - started
        if step == 1 and self.plan:  # DDP settles its buckets after its first backward
            check_buckets(self.plan, self._attachment.bucket_names)
        exposed_s = self._attachment.exposed_s
        return Reduced(loss.detach(), self._attachment.stats, elapsed_s - exposed_s, exposed_s)

    def evaluate(self) -> Tensor:
        """Evaluate this rank's share with rank 0's batch-norm statistics, and add up over ranks."""
        for buffer in self.task.model.buffers():
            self._comm.broadcast_(buffer, 0, "values")
        return self._comm.all_reduce_(self.task.evaluate(self.rank, self._comm.world_size))


class SimulatedTeam(Team):
    """All ranks in this process: their replicas are identical, so one model stands for all of them.

    The ranks' gradients are computed in turn and reduced by ``micro.Simulation``; batch-norm statistics are rank 0's,
    as DDP keeps them. The order of parameters in the flat gradient is DDP's: as defined in the first step, then as
    gradients become ready in backward. So a run equals one with real processes up to the order of floating-point sums.
    """

    is_main = True

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.task, self._config = task, config
        self._world_size = config.world_size
        kernels.prepare()
        self._batches = [task.batches(rank) for rank in range(self._world_size)]
        self._parameters = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
        layout = micro.Layout.of(self._parameters)
        reducer = scoped(build_reducer(config, steps_per_epoch=self.num_batches), config.scope)
        self._simulation = micro.Simulation(reducer, layout, self._world_size, device=task.device)
        self._rows = torch.zeros(self._world_size, layout.numel, device=task.device)
        self._ready: list[str] = []
        self._watches = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._ready.append(name))
            for name, parameter in self._parameters.items()
        ]

    @property
    def num_batches(self) -> int:
        """Steps of an epoch."""
        return self._batches[0].num_batches

    def start_epoch(self, epoch: int) -> None:
        """Begin to draw every rank's batches of an epoch."""
        self._epochs: list[Iterator[Batch]] = [batches.epoch(epoch) for batches in self._batches]

    def reduce(self, step: int) -> Reduced:
        """Compute each rank's gradient in turn, then reduce them all."""
        batches = [next(epoch) for epoch in self._epochs]
        started = time.perf_counter()
        self._rows.zero_()
        losses = [self._gradient(step, rank, batch) for rank, batch in enumerate(batches)]
        compute_s = time.perf_counter() - started
        stats = self._simulation.step_(self._rows)
        self._point_gradients_at(0)
        if self._watches:
            self._follow_ready_order()
        first = stats[0]
        return Reduced(losses[0], (first,), compute_s, first.select_s + first.exchange_s + first.rest_s)

    def evaluate(self) -> Tensor:
        """Evaluate the one model on the whole test set."""
        return self.task.evaluate(0, 1)

    def close(self) -> None:
        """End the simulation's threads."""
        self._simulation.close()

    def _gradient(self, step: int, rank: int, batch: Batch) -> Tensor:
        kept = [buffer.clone() for buffer in self.task.model.buffers()] if rank else []
        self._point_gradients_at(rank)
        seed_step(self._config.seed, step, rank, self.task.device)
        loss = self.task.loss(self.task.model, batch)
        loss.backward()
        for buffer, before in zip(self.task.model.buffers(), kept, strict=False):
            buffer.copy_(before)
        return loss.detach()

    def _point_gradients_at(self, rank: int) -> None:
        for name, view in self._simulation.layout.views(self._rows[rank]).items():
            self._parameters[name].grad = view

    def _follow_ready_order(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []
        order = self._ready[: len(self._parameters)]
        grads = {name: parameter.grad for name, parameter in self._parameters.items()}
        self._simulation.rebuild(micro.Layout.of({name: self._parameters[name] for name in order}))
        update = torch.cat([grads[name].reshape(-1) for name in order])  # type: ignore[union-attr]
        self._rows[0] = update
        self._point_gradients_at(0)


def choose_device(config: TrainConfig) -> torch.device:
    """Return this process's device: its own GPU where there are enough of them, else the CPU."""
    wanted = 1 if config.cluster.simulated else int(os.environ.get("LOCAL_WORLD_SIZE", config.cluster.nproc_per_node))
    if config.cluster.device == "cpu" or (config.cluster.device == "auto" and torch.cuda.device_count() < wanted):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
