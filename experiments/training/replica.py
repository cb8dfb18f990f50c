"""One worker of a run with local steps: a model, an optimizer and a share of the data of its own."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import micro
from experiments.config.builders import build_reducer
from experiments.config.schema import TrainConfig
from experiments.training.optimizers import build_optimizer, set_lr_
from experiments.training.tasks import Batch, Carry, Task
from experiments.training.workers import learnt_buffers, moved_to
from micro.clipping import clip_
from micro.comm import Comm
from micro.local import RoundStats
from micro.local.regrouping import regrouped
from micro.requests import carried_out
from micro.scope import scoped


class Replica:
    """A worker that trains by itself for a round of steps.

    Attributes:
        model: its own weights.
        local: what exchanges them at the end of a round, when ``optimizer`` has stepped.
    """

    def __init__(self, config: TrainConfig, task: Task, model: nn.Module, rank: int) -> None:
        self._config, self._task, self.model, self.rank = config, task, model, rank
        self.batches = task.batches(rank)
        self.optimizer = build_optimizer(config.optimizer, model, config.lr)
        self._carry: Carry = None
        self._epoch: Iterator[Batch] = iter(())
        self.local: micro.LocalSteps
        self._rounds: list[RoundStats] = []

    def join(self, comm: Comm | None) -> None:
        """Meet the other workers; all of them call this. None: those of the process group."""
        config, rounds = self._config, self._config.rounds
        steps_per_epoch = self.batches.num_batches // config.accumulate
        reducer = build_reducer(config, steps_per_epoch=max(1, steps_per_epoch // rounds.every))
        self.local = micro.LocalSteps(
            self.model,
            self.optimizer,
            scoped(reducer, config.scope),
            every=rounds.every,
            outer=micro.Outer(lr=rounds.lr, momentum=rounds.momentum, nesterov=rounds.nesterov),
            buffers=rounds.buffers,
            momentum_with_feedback=rounds.momentum_with_feedback,
            fragments=rounds.fragments,
            delay=rounds.delay,
            mix=rounds.mix,
            on_round=self._rounds.append,
            comm=comm,
        )
        self.local.count_by_hand()

    def start_epoch(self, epoch: int, start: int) -> None:
        """Start drawing the batches of an epoch at step ``start``."""
        self._epoch = self.batches.epoch(epoch, start=start * self._config.accumulate)
        if not start:
            self._carry = None

    def draw(self) -> list[Batch]:
        """Return the batches of a step."""
        return [next(self._epoch) for _ in range(self._config.accumulate)]

    def train(self, step: int, lr: float, batches: Sequence[Batch]) -> tuple[Tensor, float]:
        """Compute the gradient of a step, clipped, step, and drop it; return the mean loss and the seconds."""
        started = time.perf_counter()
        set_lr_(self.optimizer, self._config.optimizer, lr)
        self._task.seed(step, self.rank)
        losses = []
        for batch in batches:
            loss, self._carry = self._task.loss(self.model, batch, self._carry)
            (loss if len(batches) == 1 else loss / len(batches)).backward()
            losses.append(loss.detach())
        limit = self._config.optimizer.clip
        if limit is not None:
            own = [p.grad for p in self.model.parameters() if p.grad is not None]
            carried_out(clip_(own, limit), self.local.comm)
        compute_s = time.perf_counter() - started
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean(), compute_s

    def ended(self) -> list[RoundStats]:
        """Return what the exchanges report that have ended since the last call."""
        ended, self._rounds[:] = self._rounds[:], []
        return ended

    def state(self) -> dict[str, Any]:
        """Return what this worker needs to go on."""
        own = {"inner": self.optimizer.state_dict(), "own_buffers": [b.clone() for b in learnt_buffers(self.model)]}
        return {**self.local.state_dict(), **own, "carry": self._carry}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned, of another group of ranks too where the run goes on without lost workers."""
        local = {key: state[key] for key in state if key not in ("inner", "own_buffers", "carry")}
        is_own, is_as_many = local["rank"] == self.rank, local["world_size"] == self.local.comm.world_size
        if self._config.rounds.lost_workers == "go_on":
            local = regrouped(local, self.local.comm)
        if is_own:  # else a rank begins with a new inner state
            self.optimizer.load_state_dict(state["inner"])
        self.local.load_state_dict(local)
        for buffer, saved in zip(learnt_buffers(self.model), state["own_buffers"], strict=True):
            buffer.copy_(saved)
        self._carry = moved_to(state["carry"], self._task.device) if is_as_many else None  # texts are dealt again
        self._rounds.clear()
