"""The workers of a run, as its loop sees them: real processes, or all of them in one."""

import inspect
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from experiments.config.builders import build_reducer
from experiments.config.schema import TrainConfig
from experiments.training.bucketing import agreed_plan, bucket_caps, check_buckets
from experiments.training.seeding import seed_step
from experiments.training.tasks import Batch, Carry, Task
from micro import kernels
from micro.clipping import clip_
from micro.comm import GroupComm, gather_objects
from micro.planning.schedules.base import Plan
from micro.scope import scoped


@dataclass(frozen=True, slots=True)
class Reduced:
    """Gradients are reduced and wait in the parameters.

    Attributes:
        loss: of rank 0's batches.
        stats: of the step on rank 0, one per bucket.
        compute_s: seconds of forward and backward without the reduction, summed over the ranks that this process is.
        exposed_s: seconds of the reduction that backward did not hide.
        load_s: seconds of drawing the batches, summed like compute_s.
    """

    loss: Tensor
    stats: tuple[micro.StepStats, ...]
    compute_s: float
    exposed_s: float
    load_s: float


class Team(ABC):
    """All workers together. One optimizer step follows each ``reduce``.

    Attributes:
        ranks: those that this process is.
        num_batches: batches of each rank in an epoch.
    """

    task: Task
    is_main: bool
    ranks: Sequence[int]
    num_batches: int
    plan: Plan | None = None  # of the buckets, where a schedule made one

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.task, self._config = task, config
        self._carries: list[Carry] = []

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return self.num_batches // self._config.accumulate

    @abstractmethod
    def start_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Begin to draw the batches of an epoch, from step ``start`` on; carries are as they were left there."""

    @abstractmethod
    def reduce(self, step: int, lr: float) -> Reduced:
        """Draw each rank's batches, compute the gradients and reduce them; they were set to zero before."""

    @abstractmethod
    def evaluate(self) -> Tensor:
        """Return the task's sums over the whole test set."""

    @abstractmethod
    def agree(self, item: Any) -> list[Any]:
        """Return the item of every process of the run, in rank order."""

    @abstractmethod
    def residuals(self) -> list[Tensor]:
        """Return what the first of this process's ranks keeps back, as vectors; empty ones where it keeps nothing."""

    def residual_norm(self) -> float | None:
        """Return the L2 norm of ``residuals``, None where nothing is kept: one more read of the whole vector."""
        kept = [residual for residual in self.residuals() if residual.numel()]
        if not kept:
            return None
        if self.task.device.type == "cuda":
            torch.cuda.synchronize(self.task.device)  # residuals are written on a stream of their own
        return float(torch.stack([torch.linalg.vector_norm(residual) for residual in kept]).norm())

    @abstractmethod
    def states(self) -> list[dict[str, Any]]:
        """Return what each of this process's ranks alone knows: residuals, thresholds, boundaries, carries."""

    @abstractmethod
    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from what ``states`` returned."""

    def close(self) -> None:  # noqa: B027 - most teams have nothing to end
        """End what the team started."""

    def _scale(self, lr: float) -> float:
        """What a loss is multiplied by, so that the gradients of a step add up to their mean."""
        return (lr if self._config.optimizer.scales_gradients else 1.0) / self._config.accumulate

    def _clip(self, lr: float) -> float | None:
        """The greatest norm of a worker's gradient as it is scaled, None for no bound."""
        chosen = self._config.optimizer
        if chosen.clip is None or chosen.clip_at != "gradient":
            return None
        return chosen.clip * (lr if chosen.scales_gradients else 1.0)


class ProcessTeam(Team):
    """This process is one rank of a torch.distributed group; DDP drives, micro reduces."""

    def __init__(self, config: TrainConfig, task: Task) -> None:
        super().__init__(config, task)
        self.rank = dist.get_rank()
        self.is_main, self.ranks = self.rank == 0, [self.rank]
        self._batches = task.batches(self.rank)
        self.num_batches = self._batches.num_batches
        self._comm = GroupComm()
        kernels.prepare()
        self.plan = agreed_plan(config, task.model, self._comm)
        self._ddp = DistributedDataParallel(
            task.model,
            device_ids=[task.device] if task.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **unsynced_buffers(task.model),
            **bucket_caps(config, task.model, self.plan),
        )
        reducer = build_reducer(config, steps_per_epoch=self.num_steps)
        self._attachment = micro.attach(
            self._ddp, reducer, scope=config.scope, clip=self._clip(config.lr), timed=config.timed
        )
        self._rehearse()

    def start_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Begin to draw this rank's batches of an epoch."""
        self._epoch = self._batches.epoch(epoch, start=start * self._config.accumulate)
        if not start:
            self._carries = [None]

    def reduce(self, step: int, lr: float) -> Reduced:
        """Compute this rank's gradients; the hook reduces them during the last backward."""
        started = time.perf_counter()
        batches = [next(self._epoch) for _ in range(self._config.accumulate)]
        load_s = time.perf_counter() - started
        seed_step(self._config.seed, step, self.rank, self.task.device)
        self._attachment.clip = self._clip(lr)
        started = self._comm.now(self.task.device)
        loss = self._backward(batches, self._scale(lr))
        elapsed_s = self._comm.now(self.task.device) - started
        exposed_s = self._attachment.exposed_s
        return Reduced(loss, self._attachment.stats, elapsed_s - exposed_s, exposed_s, load_s)

    def evaluate(self) -> Tensor:
        """Evaluate this rank's share with rank 0's batch-norm statistics, and add up over ranks."""
        for buffer in learnt_buffers(self.task.model):
            self._comm.broadcast_(buffer, 0, "values")
        return self._comm.all_reduce_(self.task.evaluate(self.rank, self._comm.world_size))

    def agree(self, item: Any) -> list[Any]:
        """Return every rank's item."""
        return gather_objects(item)

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one vector per bucket."""
        return self._attachment.residuals()

    def states(self) -> list[dict[str, Any]]:
        """Return this rank's state."""
        return [{**self._attachment.state_dict(), "carry": self._carries[0]}]

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from this rank's state."""
        self._attachment.load_state_dict(states[0])
        self._carries = [_on(states[0]["carry"], self.task.device)]

    def _backward(self, batches: Sequence[Batch], scale: float) -> Tensor:
        losses = []
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else self._ddp.no_sync():
                loss, self._carries[0] = self.task.loss(self._ddp, batch, self._carries[0])
                (loss if scale == 1 else loss * scale).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def _rehearse(self) -> None:
        """Let DDP settle its buckets before the first step, so that a run that goes on has those it had before.

        A plan is held against the buckets as well, which a second backward shows.
        """
        with kept_buffers(self.task.model), self._attachment.rehearsal():
            for _ in range(2 if self.plan else 1):
                self._carries = [None]
                seed_step(self._config.seed, 0, self.rank, self.task.device)
                self._backward([next(self._batches.epoch(0))], 1.0)
        for parameter in self.task.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        if self.plan:
            check_buckets(self.plan, self._attachment.bucket_names)


class SimulatedTeam(Team):
    """All ranks in this process: their replicas are identical, so one model stands for all of them.

    The ranks' gradients are computed in turn and reduced by ``micro.Simulation``; batch-norm statistics are rank 0's,
    as DDP keeps them. The order of parameters in the flat gradient is that in which gradients become ready in backward,
    as DDP's is. So a run equals one with real processes up to the order of floating-point sums.
    """

    is_main = True

    def __init__(self, config: TrainConfig, task: Task) -> None:
        super().__init__(config, task)
        self.ranks = range(config.world_size)
        kernels.prepare()
        self._batches = [task.batches(rank) for rank in self.ranks]
        self.num_batches = self._batches[0].num_batches
        self._parameters = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
        layout = micro.Layout.of({name: self._parameters[name] for name in self._ready_order()})
        reducer = scoped(build_reducer(config, steps_per_epoch=self.num_steps), config.scope)
        self._simulation = micro.Simulation(reducer, layout, config.world_size, device=task.device)
        self._rows = torch.zeros(config.world_size, layout.numel, device=task.device)

    def start_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Begin to draw every rank's batches of an epoch."""
        first = start * self._config.accumulate
        self._epochs: list[Iterator[Batch]] = [batches.epoch(epoch, start=first) for batches in self._batches]
        if not start:
            self._carries = [None] * len(self.ranks)

    def reduce(self, step: int, lr: float) -> Reduced:
        """Compute each rank's gradient in turn, then reduce them all."""
        started = time.perf_counter()
        batches = [[next(epoch) for _ in range(self._config.accumulate)] for epoch in self._epochs]
        drawn = time.perf_counter()
        self._rows.zero_()
        losses = [self._gradient(step, rank, given, lr) for rank, given in enumerate(batches)]
        compute_s = time.perf_counter() - drawn
        stats = self._simulation.step_(self._rows)
        self._point_gradients_at(0)
        first = stats[0]
        exposed_s = first.select_s + first.exchange_s + first.rest_s
        return Reduced(losses[0], (first,), compute_s, exposed_s, drawn - started)

    def evaluate(self) -> Tensor:
        """Evaluate the one model on the whole test set."""
        return self.task.evaluate(0, 1)

    def agree(self, item: Any) -> list[Any]:
        """Return the item: there is one process."""
        return [item]

    def residuals(self) -> list[Tensor]:
        """Return rank 0's residual."""
        return self._simulation.residuals()[:1]

    def states(self) -> list[dict[str, Any]]:
        """Return every rank's state."""
        ranks = self._simulation.state_dict()["ranks"]
        return [{"buckets": [bucket], "carry": carry} for bucket, carry in zip(ranks, self._carries, strict=True)]

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from every rank's state; the parameters may have lain in several buckets."""
        self._simulation.load_buckets([state["buckets"] for state in states])
        self._carries = [_on(state["carry"], self.task.device) for state in states]

    def close(self) -> None:
        """End the simulation's threads."""
        self._simulation.close()

    def _gradient(self, step: int, rank: int, batches: Sequence[Batch], lr: float) -> Tensor:
        with kept_buffers(self.task.model) if rank else nullcontext():
            self._point_gradients_at(rank)
            seed_step(self._config.seed, step, rank, self.task.device)
            losses = [self._backward(rank, batch, self._scale(lr)) for batch in batches]
        limit = self._clip(lr)
        if limit is not None:
            clip_([self._rows[rank]], limit)
        return torch.stack(losses).mean()

    def _backward(self, rank: int, batch: Batch, scale: float) -> Tensor:
        loss, self._carries[rank] = self.task.loss(self.task.model, batch, self._carries[rank])
        (loss if scale == 1 else loss * scale).backward()
        return loss.detach()

    def _point_gradients_at(self, rank: int) -> None:
        """Let gradients be views of a rank's row, laid out in memory as their parameters are, as DDP does it."""
        row = self._rows[rank]
        for name, place in self._simulation.layout.slices():
            parameter, offset = self._parameters[name], row.storage_offset() + place.start
            parameter.grad = row.as_strided(parameter.shape, parameter.stride(), offset)

    def _ready_order(self) -> list[str]:
        """Return the parameters' names in the order in which a backward makes their gradients."""
        ready: list[str] = []
        watches = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
            for name, parameter in self._parameters.items()
        ]
        with kept_buffers(self.task.model):
            seed_step(self._config.seed, 0, 0, self.task.device)
            self.task.loss(self.task.model, next(self._batches[0].epoch(0)))[0].backward()
        for watch in watches:
            watch.remove()
        return ready + [name for name in self._parameters if name not in ready]


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Give a model's buffers back the values that they had before."""
    kept = [buffer.clone() for buffer in learnt_buffers(model)]
    yield
    for buffer, before in zip(learnt_buffers(model), kept, strict=True):
        buffer.copy_(before)


def learnt_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that training changes, such as batch norm's: those that are part of the model's state."""
    parameters = {id(parameter) for parameter in model.parameters()}
    state = model.state_dict(keep_vars=True).values()
    return [tensor for tensor in state if id(tensor) not in parameters]


def unsynced_buffers(model: nn.Module) -> dict[str, Any]:
    """Return DDP's argument that keeps it from sending buffers before each step, where none of them changes."""
    if learnt_buffers(model):
        return {}
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def choose_device(config: TrainConfig) -> torch.device:
    """Return this process's device: its own GPU where there are enough of them, else the CPU."""
    wanted = 1 if config.cluster.simulated else int(os.environ.get("LOCAL_WORLD_SIZE", config.cluster.nproc_per_node))
    if config.cluster.device == "cpu" or (config.cluster.device == "auto" and torch.cuda.device_count() < wanted):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def _on(carry: Carry, device: torch.device) -> Carry:
    return None if carry is None else tuple(part.to(device) for part in carry)
