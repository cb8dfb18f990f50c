"""The workers of a run with local steps: one per process, or all simulated in one process."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import micro
from experiments.config.builders import build_reducer
from experiments.config.schema import TrainConfig
from experiments.training.optimizers import build_optimizer, set_lr_
from experiments.training.tasks import Batch, Task
from experiments.training.workers import Reduced, Workers, kept_buffers, learnt_buffers, moved_to
from micro.comm.lockstep import SimulatedRanks
from micro.comm.loop import carried_out
from micro.comm.ranks import Comm
from micro.local import RoundStats
from micro.local.regrouping import regrouped
from micro.reducers.scope import scoped
from micro.values.clipping import clip_


@dataclass(slots=True)
class Replica:
    """A worker's own weights.

    Attributes:
        local: what exchanges them at the end of a round, when ``optimizer`` has stepped.
        ended: what its exchanges report that have ended since they were last read.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    local: micro.LocalSteps
    ended: list[RoundStats] = field(default_factory=list)


class RoundWorkers(Workers):
    """Workers that each take steps of their own optimizer, and exchange weights at the end of a round.

    Attributes:
        replicas: the workers of this process.
    """

    def __init__(self, config: TrainConfig, task: Task) -> None:
        super().__init__(config, task)
        self._steps_left = 0
        models = [task.model, *(copy.deepcopy(task.model) for _ in self.ranks[1:])]
        self._simulated = SimulatedRanks(config.world_size) if self._comm is None else None
        self.replicas: list[Replica]
        if self._simulated is None:
            self.replicas = [self._joined(task.model, None)]
            return
        self.replicas = self._simulated.run(lambda comm: self._joined(models[comm.rank], comm))
        for replica in self.replicas:
            replica.local.share_start(self.replicas[0].local)

    def start_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Start drawing every worker's batches of an epoch."""
        super().start_epoch(epoch, start=start)
        self._steps_left = (self._config.epochs - epoch) * self.num_steps - start

    def take_step(self, step: int, lr: float) -> Reduced:
        """Take a step of each worker's own optimizer; at the end of a round, and of the run, exchange their weights."""
        started = time.perf_counter()
        drawn = self._draw()
        load_s = time.perf_counter() - started
        computed = [self.train(place, step, lr, batches) for place, batches in enumerate(drawn)]
        began = time.perf_counter()
        if self.replicas[0].local.ranks_meet_next:
            self._on_each(lambda replica: replica.local.after_step())
        else:
            for replica in self.replicas:
                replica.local.after_step()
        self._steps_left -= 1
        if not self._steps_left:
            self._on_each(lambda replica: replica.local.finish())
        exposed_s = time.perf_counter() - began
        ended = tuple(self.replicas[0].ended)
        for replica in self.replicas:
            replica.ended.clear()
        stats = tuple(vector for exchange in ended for vector in exchange.vectors)
        compute_s = sum(seconds for _, seconds in computed)
        exposed_s = exposed_s if ended else 0.0
        return Reduced(computed[0][0], stats, compute_s, self._forward_s(), exposed_s, load_s, ended)

    def train(self, place: int, step: int, lr: float, batches: Sequence[Batch]) -> tuple[Tensor, float]:
        """Take a step of one worker's own optimizer; return the mean loss, and the seconds that its gradient took.

        Args:
            place: of the worker in ``replicas``.
        """
        began = self._now(self.device)
        replica, chosen = self.replicas[place], self._config.optimizer
        set_lr_(replica.optimizer, chosen, lr)
        self.task.seed(step, self.ranks[place])
        loss = self._backward(replica.model, place, batches, 1 / self._config.accumulate)
        if chosen.clip is not None:
            own = [p.grad for p in replica.model.parameters() if p.grad is not None]
            carried_out(clip_(own, chosen.clip), replica.local.comm)
        compute_s = self._now(self.device) - began
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        return loss, compute_s

    def evaluate(self) -> Tensor:
        """Evaluate the weights of the last round, with the first worker's buffers."""
        with self.replicas[0].local.global_weights(), kept_buffers(self.task.model):
            return super().evaluate()

    def residuals(self) -> list[Tensor]:
        """Return the first worker's residuals."""
        return self.replicas[0].local.residuals()

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each worker of this process."""
        return [
            {
                **replica.local.state_dict(),
                "inner": replica.optimizer.state_dict(),
                "own_buffers": [buffer.clone() for buffer in learnt_buffers(replica.model)],
                "carry": carry,
            }
            for replica, carry in zip(self.replicas, self._carries, strict=True)
        ]

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what ``states`` returned, of another group of ranks too where the run goes on without lost ones."""
        for place, (replica, state) in enumerate(zip(self.replicas, states, strict=True)):
            local = {key: state[key] for key in state if key not in ("inner", "own_buffers", "carry")}
            is_own, is_as_many = (
                local["rank"] == self.ranks[place],
                local["world_size"] == replica.local.comm.world_size,
            )
            if self._config.rounds.lost_workers == "go_on":
                local = regrouped(local, replica.local.comm)
            if is_own:  # else a rank begins with a new inner state
                replica.optimizer.load_state_dict(state["inner"])
            replica.local.load_state_dict(local)
            for buffer, saved in zip(learnt_buffers(replica.model), state["own_buffers"], strict=True):
                buffer.copy_(saved)
            carry = state["carry"] if is_as_many else None  # texts are dealt again
            self._carries[place] = moved_to(carry, self.task.device)
            replica.ended.clear()

    def close(self) -> None:
        """Let go of the process group of the rounds."""
        if self._simulated is None:
            self.replicas[0].local.close()

    def _rehearse_step(self, step: int) -> None:
        self._steps_left = 1  # so that each step ends with an exchange of all weights
        self.take_step(step, self._config.lr)

    def _on_each(self, work: Callable[[Replica], object]) -> None:
        """Let every worker exchange something."""
        if self._simulated is None:
            work(self.replicas[0])
        else:
            self._simulated.run(lambda comm: work(self.replicas[comm.rank]))

    def _joined(self, model: nn.Module, comm: Comm | None) -> Replica:
        """Return a worker that has met the others, all of which call this. None: those of the process group."""
        config, rounds = self._config, self._config.rounds
        ended: list[RoundStats] = []
        optimizer = build_optimizer(config.optimizer, model, config.lr)
        local = micro.LocalSteps(
            model,
            optimizer,
            scoped(build_reducer(config), config.scope),
            every=rounds.every,
            outer=micro.Outer(lr=rounds.lr, momentum=rounds.momentum, nesterov=rounds.nesterov),
            buffers=rounds.buffers,
            momentum_with_feedback=rounds.momentum_with_feedback,
            fragments=rounds.fragments,
            delay=rounds.delay,
            mix=rounds.mix,
            on_round=ended.append,
            comm=comm,
        )
        local.use_manual_steps()
        return Replica(model, optimizer, local, ended)
