"""The training loop: steps, epochs, and what is recorded of them."""

import time
from typing import Any

import torch

import micro
from experiments.harness.config import TrainConfig
from experiments.harness.records import RecordWriter, RunFolder
from experiments.harness.teams import Reduced, Team


class Trainer:
    """One run's training: a team of workers, an optimizer, and rank 0's records.

    Raises:
        RecordError: a record cannot be written.
    """

    def __init__(self, config: TrainConfig, team: Team, folder: RunFolder) -> None:
        self._config, self._team = config, team
        self._recorder = Recorder(folder) if team.is_main else None
        self._step, self._time_s = 0, 0.0
        self._optimizer = torch.optim.SGD(
            team.task.model.parameters(),
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )

    def run(self) -> dict[str, Any]:
        """Train to the end and return the last epoch's row.

        Raises:
            NonFiniteGradient: a gradient held NaN or Inf and the policy is to stop.
        """
        row: dict[str, Any] = {}
        for epoch in range(self._config.epochs):
            self._team.start_epoch(epoch)
            losses = [self.step(epoch, index) for index in range(self._team.num_batches)]
            row = self._evaluate(epoch, sum(losses) / len(losses))
        if self._recorder:
            self._recorder.close()
        return row

    def step(self, epoch: int, index: int) -> float:
        """Take one step, batch ``index`` of an epoch, and return the loss of rank 0's batch."""
        started = time.perf_counter()
        lr = learning_rate(self._config, epoch + index / self._team.num_batches)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad(set_to_none=False)  # gradients stay views of DDP's buckets: nothing is copied
        reduced = self._team.reduce(self._step)
        if not any(stats.skipped for stats in reduced.stats):
            self._optimizer.step()
        loss = float(reduced.loss)  # host sync: the record needs it, and the step's time its end
        step_s = time.perf_counter() - started
        self._time_s += step_s
        if self._recorder:
            self._recorder.step(step_row(self._step, epoch, loss, lr, reduced, step_s, self._time_s))
        self._step += 1
        return loss

    def _evaluate(self, epoch: int, train_loss: float) -> dict[str, Any]:
        test_loss, correct, num_samples = self._team.evaluate().tolist()
        row = {
            "epoch": epoch,
            "step": self._step,
            "time_s": self._time_s,
            "train_loss": train_loss,
            "test_loss": test_loss / num_samples,
            "accuracy": correct / num_samples,
            "num_samples": int(num_samples),
        }
        if self._recorder:
            self._recorder.epoch(row)
        return row


def learning_rate(config: TrainConfig, epoch: float) -> float:
    """Return the learning rate at a point of the schedule: linear warm-up, then a factor at each milestone.

    Args:
        epoch: epochs done, as a fraction.
    """
    warmup = min((epoch + 1e-9) / config.lr_warmup_epochs, 1.0) if config.lr_warmup_epochs else 1.0
    return config.lr * max(warmup, 0.01) * config.lr_decay ** sum(epoch >= mark for mark in config.lr_milestones)


class Recorder:
    """Rank 0's records of a run."""

    def __init__(self, folder: RunFolder) -> None:
        self._steps = RecordWriter(folder.steps_path)
        self._epochs = RecordWriter(folder.epochs_path)

    def step(self, row: dict[str, Any]) -> None:
        """Append a row for one step."""
        self._steps.append(row)

    def epoch(self, row: dict[str, Any]) -> None:
        """Append a row for one epoch."""
        self._epochs.append(row)

    def close(self) -> None:
        """Close the files."""
        self._steps.close()
        self._epochs.close()


def step_row(
    step: int, epoch: int, loss: float, lr: float, reduced: Reduced, step_s: float, time_s: float
) -> dict[str, Any]:
    """Return what is recorded of a step: the buckets of a dense step added up."""
    stats = reduced.stats
    numel = sum(s.num_choices for s in stats)
    target = sum(s.target_count for s in stats)
    updated = sum(s.global_count for s in stats)
    whole: micro.StepStats = stats[0]
    select_s, exchange_s = sum(s.select_s for s in stats), sum(s.exchange_s for s in stats)
    work_s = select_s + exchange_s + sum(s.rest_s for s in stats)
    seen = min(1.0, reduced.exposed_s / work_s) if work_s else 0.0  # the share that backward did not hide
    select_s, exchange_s = seen * select_s, seen * exchange_s
    return {
        "step": step,
        "epoch": epoch,
        "loss": loss,
        "lr": lr,
        "rule": whole.rule,
        "target_density": target / numel,
        "density": updated / numel,
        "local_density": sum(s.local_count for s in stats) / numel,
        "density_error": abs(updated / target - 1),
        "build_up": updated / target,
        "imbalance": whole.imbalance,
        "threshold": whole.threshold,
        "relative_error": whole.relative_error,
        "bytes_sent": sum(s.bytes_sent for s in stats),
        "counts_bytes": sum(s.counts_bytes for s in stats),
        "indices_bytes": sum(s.indices_bytes for s in stats),
        "values_bytes": sum(s.values_bytes for s in stats),
        "num_collectives": sum(s.num_collectives for s in stats),
        "compute_s": reduced.compute_s,
        "select_s": select_s,
        "exchange_s": exchange_s,
        "hidden_s": (1 - seen) * work_s,
        "rest_s": max(step_s - reduced.compute_s - select_s - exchange_s, 0.0),
        "step_s": step_s,
        "time_s": time_s,
        "skipped": any(s.skipped for s in stats),
    }
