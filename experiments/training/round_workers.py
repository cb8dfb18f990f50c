"""The workers of a run with local steps: one of them is this process, or all are in it."""

import copy
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from experiments.config.schema import TrainConfig
from experiments.training.replica import Replica
from experiments.training.round_memory import announce
from experiments.training.tasks import Task
from experiments.training.workers import Reduced, Workers, kept_buffers, learnt_buffers
from micro.group_comm import GroupComm
from micro.lockstep import SimulatedRanks
from micro.objects import gather_objects
from micro.requests import AllReduce, Broadcast


class RoundWorkers(Workers):
    """Workers that each take steps of their own optimizer, and exchange weights at the end of a round.

    Attributes:
        replicas: the workers of this process.
    """

    replicas: list[Replica]

    def _begin(self) -> None:
        self.num_batches = self.replicas[0].batches.num_batches
        self._steps_left = 0

    def start_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Start drawing every worker's batches of an epoch."""
        self._steps_left = (self._config.epochs - epoch) * self.num_steps - start
        for replica in self.replicas:
            replica.start_epoch(epoch, start)

    def take_step(self, step: int, lr: float) -> Reduced:
        """Take a step of each worker's own optimizer; at the end of a round, and of the run, exchange their weights."""
        started = time.perf_counter()
        drawn = [replica.draw() for replica in self.replicas]
        load_s = time.perf_counter() - started
        computed = [replica.train(step, lr, batches) for replica, batches in zip(self.replicas, drawn, strict=True)]
        began = time.perf_counter()
        self._after_step(ranks_meet=self.replicas[0].local.ranks_meet_next)
        self._steps_left -= 1
        if not self._steps_left:
            self._finish()
        exposed_s = time.perf_counter() - began
        first, *_ = [replica.ended() for replica in self.replicas]
        ended = tuple(first)
        stats = tuple(vector for exchange in ended for vector in exchange.vectors)
        compute_s = sum(seconds for _, seconds in computed)
        return Reduced(computed[0][0], stats, compute_s, exposed_s if ended else 0.0, load_s, ended)

    def _rehearse_step(self, step: int) -> None:
        self._steps_left = 1  # so that each step ends with an exchange of all weights
        self.take_step(step, self._config.lr)

    @abstractmethod
    def _after_step(self, *, ranks_meet: bool) -> None:
        """Let every worker begin and end the exchanges that are due after its step."""

    @abstractmethod
    def _finish(self) -> None:
        """End the round that is under way."""

    def residuals(self) -> list[Tensor]:
        """Return the first worker's residuals."""
        return self.replicas[0].local.residuals()

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each worker of this process."""
        return [replica.state() for replica in self.replicas]

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what ``states`` returned."""
        for replica, state in zip(self.replicas, states, strict=True):
            replica.load(state)


class RealRoundWorkers(RoundWorkers):
    """This process is one worker."""

    def __init__(self, config: TrainConfig, task: Task) -> None:
        super().__init__(config, task)
        self.rank = dist.get_rank()
        self.is_main, self.ranks = self.rank == 0, [self.rank]
        self._comm = GroupComm()
        self.replicas = [Replica(config, task, task.model, self.rank)]
        self._begin()
        self.replicas[0].join(None)

    def _after_step(self, *, ranks_meet: bool) -> None:
        self.replicas[0].local.after_step()

    def _finish(self) -> None:
        self.replicas[0].local.finish()

    def evaluate(self) -> Tensor:
        """Evaluate this worker's share of the test set with the weights of the last round and rank 0's buffers."""
        with self.replicas[0].local.global_weights(), kept_buffers(self.task.model):
            for buffer in learnt_buffers(self.task.model):
                self._comm.answer(Broadcast(mine=buffer, source=0))
            return self._comm.answer(AllReduce(mine=self.task.evaluate(self.rank, self._comm.world_size)))

    def gather_items(self, item: Any) -> list[Any]:
        """Return every rank's item."""
        return gather_objects(item)

    def close(self) -> None:
        """Let go of the process group of the rounds."""
        self.replicas[0].local.close()


class SimulatedRoundWorkers(RoundWorkers):
    """All workers in this process, each with a model and an optimizer of its own; threads exchange their weights."""

    is_main = True

    def __init__(self, config: TrainConfig, task: Task) -> None:
        super().__init__(config, task)
        self.ranks = range(config.world_size)
        announce(config, sum(parameter.numel() for parameter in task.model.parameters()))
        models = [task.model, *(copy.deepcopy(task.model) for _ in self.ranks[1:])]
        self.replicas = [Replica(config, task, model, rank) for rank, model in enumerate(models)]
        self._begin()
        self._group = SimulatedRanks(config.world_size)
        self._group.run(lambda comm: self.replicas[comm.rank].join(comm))
        for replica in self.replicas:
            replica.local.share_start(self.replicas[0].local)

    def _after_step(self, *, ranks_meet: bool) -> None:
        if ranks_meet:
            self._group.run(lambda comm: self.replicas[comm.rank].local.after_step())
            return
        for replica in self.replicas:
            replica.local.after_step()

    def _finish(self) -> None:
        self._group.run(lambda comm: self.replicas[comm.rank].local.finish())

    def evaluate(self) -> Tensor:
        """Evaluate the weights of the last round, with the first worker's buffers, on the whole test set."""
        with self.replicas[0].local.global_weights():
            return self.task.evaluate(0, 1)

    def gather_items(self, item: Any) -> list[Any]:
        """Return the item: there is one process."""
        return [item]

    def close(self) -> None:
        """End the simulation's threads."""
        self._group.close()
