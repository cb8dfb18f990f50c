"""Training by one form of local steps after another on a rank of ``experiments.bench network_rounds``."""

import time
from typing import Any

import torch.distributed as dist

from experiments.benchmarks.network.training import CPU
from experiments.training.ddp_workers import DdpWorkers
from experiments.training.optimizers import learning_rate
from experiments.training.preflight import prepare_runs
from experiments.training.recording import step_row
from experiments.training.round_workers import RealRoundWorkers
from experiments.training.tasks import load_task
from experiments.training.workers import Workers

RECORDED = ("compute_s", "bytes_sent", "num_collectives")  # of what a run records of each step


class RoundTraining:
    """A training of the harness, without records on the disk."""

    def __init__(self, words: list[str]) -> None:
        (config,) = prepare_runs([words], joined_world_size=dist.get_world_size())
        task = load_task(config, CPU)
        self._workers: Workers = RealRoundWorkers(config, task) if config.rounds.every else DdpWorkers(config, task)
        self._config, self._step = config, 0

    def step(self) -> dict[str, Any]:
        """Take a step; return what a run would record of it."""
        epoch, index = divmod(self._step, self._workers.num_steps)
        if index == 0:
            self._workers.start_epoch(epoch)
        lr = learning_rate(self._config, epoch + index / self._workers.num_steps)
        reduced = self._workers.take_step(self._step, lr)
        self._step += 1
        row = step_row(self._step, epoch, float(reduced.loss), lr, reduced, step_s=0.0, time_s=0.0)
        return {key: row[key] for key in RECORDED}

    def close(self) -> None:
        """Let go of what the workers hold."""
        self._workers.close()


_training: RoundTraining | None = None  # of this rank: it lasts from one call to the next


def begin_rounds(words: list[str]) -> None:
    """Begin to train by a form on this rank, instead of the one before."""
    global _training
    if _training:
        _training.close()
    _training = None  # frees its memory first
    _training = RoundTraining(words)


def train_rounds(number: int, round_steps: int) -> dict[str, list[Any]]:
    """Train some rounds in a row; return the seconds of each, and a row of each step."""
    assert _training
    seconds, steps = [], []
    dist.barrier()
    for _ in range(number):
        started = time.perf_counter()
        steps += [_training.step() for _ in range(round_steps)]
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "steps": steps}
