"""One rank per process: DistributedDataParallel computes the gradients, micro's communication hook reduces them."""

import inspect
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from experiments.config.builders import build_reducer
from experiments.config.schema import TrainConfig
from experiments.training.bucketing import agreed_plan, bucket_caps, check_buckets
from experiments.training.tasks import Task
from experiments.training.workers import GradientWorkers, Reduced, kept_buffers, learnt_buffers, moved_to


class DdpWorkers(GradientWorkers):
    """This process is one rank of a torch.distributed group; DDP drives, micro reduces."""

    def __init__(self, config: TrainConfig, task: Task) -> None:
        super().__init__(config, task)
        assert self._comm
        self.plan = agreed_plan(config, task.model, self._comm)
        self._ddp = DistributedDataParallel(
            task.model,
            device_ids=[task.device] if task.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **unsynced_buffers(task.model),
            **bucket_caps(config, task.model, self.plan),
        )
        self._attachment = micro.attach(
            self._ddp,
            build_reducer(config),
            scope=config.scope,
            clip=self._clip(config.lr),
            clip_norm=config.optimizer.clip_norm,
            timed=config.timed,
        )
        self._rehearse()

    def reduce(self, step: int, lr: float) -> Reduced:
        """Compute this rank's gradients; the hook reduces them during the last backward."""
        started = time.perf_counter()
        (batches,) = self._draw()
        load_s = time.perf_counter() - started
        self.task.seed(step, self.ranks[0])
        self._attachment.clip = self._clip(lr)
        began = self._now(self.task.device)
        loss = self._backward(self._ddp, 0, batches, self._scale(lr), hold=self._ddp.no_sync)
        ended = self._now(self.task.device)
        elapsed_s, exposed_s = ended - began, self._attachment.exposed_s
        return Reduced(loss, self._attachment.stats, elapsed_s - exposed_s, self._forward_s(), exposed_s, load_s)

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, one vector per bucket."""
        return self._attachment.residuals()

    def states(self) -> list[dict[str, Any]]:
        """Return this rank's state."""
        return [{**self._attachment.state_dict(), "carry": self._carries[0]}]

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore this rank's state."""
        self._attachment.load_state_dict(states[0])
        self._carries = [moved_to(states[0]["carry"], self.task.device)]

    def _rehearse(self) -> None:
        """Let DDP rebuild its buckets before the first step, so that a resumed run has the same ones.

        DDP rebuilds them after its first backward. With a plan, a second backward shows them, and they are compared.
        """
        with kept_buffers(self.task.model), self._attachment.rehearsal():
            for _ in range(2 if self.plan else 1):
                self._carries = [None]
                self.task.seed(0, self.ranks[0])
                self._backward(self._ddp, 0, [next(self._batches[0].epoch(0))], 1.0)
        for parameter in self.task.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        if self.plan:
            check_buckets(self.plan, self._attachment.bucket_names)


def unsynced_buffers(model: nn.Module) -> dict[str, Any]:
    """Return the argument that stops DDP from sending buffers before each step, if training changes none of them."""
    if learnt_buffers(model):
        return {}
    parameters = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False}
