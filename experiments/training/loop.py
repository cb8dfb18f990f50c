"""The training loop: steps, epochs, checkpoints, and the resume from a checkpoint."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from experiments.config.errors import UserError, one_line
from experiments.config.schema import TrainConfig
from experiments.launching.stalls import notes
from experiments.runs.files import Digest
from experiments.runs.rank_files import Position, Saved, read_start_from, set_random_state
from experiments.runs.run_folder import RunFolder
from experiments.runs.saving import Checkpointer
from experiments.training.optimizers import learning_rate
from experiments.training.recording import Recorder, speed_of_words, step_row
from experiments.training.workers import Workers


class Trainer:
    """One run's training: the workers, an optimizer, and rank 0's records.

    Args:
        store: the key-value store that real ranks share; see Checkpointer.

    Attributes:
        position: the next step, and the epoch it is in.
        resumed_from: the checkpoint that the run resumed from, None for a run that starts from step 0.
        unused_checkpoints: why checkpoints were not used, a line for each.
        groups: of ranks that trained together: their first step, and how many they are; none where the run does not go
            on without lost workers.

    Raises:
        UserError: a record or checkpoint cannot be read or written.
    """

    def __init__(
        self, config: TrainConfig, workers: Workers, folder: RunFolder, store: dist.Store | None = None
    ) -> None:
        self._config, self._workers = config, workers
        self._checkpointer = Checkpointer(config, workers, folder, store)
        self.position = Position()
        own, self.unused_checkpoints = self._checkpointer.resume()
        notes.begin("the warm-up")
        workers.warm_up()
        self.resumed_from = own or read_start_from(config, workers)
        if self.resumed_from:
            self._load(self.resumed_from, of=folder.path if own else config.start_from)
        self.groups = _groups_until_now(config, own, workers.num_ranks)
        self._recorder = Recorder(folder, own.records if own else {}) if workers.is_main else None
        self._last_end = time.perf_counter()  # of a step, or of what does not count as training

    def run(self, mark_done: Callable[[], None] = lambda: None) -> bool:
        """Train to the end; return False if a signal stopped the run, after it was saved.

        Args:
            mark_done: called on rank 0 at the end, before the checkpoints are removed.

        Raises:
            NonFiniteGradient: a gradient held NaN or Inf and the policy is to stop.
        """
        self._last_end = time.perf_counter()
        while self.position.epoch < self._config.epochs:
            first = self.position
            self._workers.start_epoch(first.epoch, start=first.index)
            for index in range(first.index, self._workers.num_steps):
                action = self._checkpointer.next_action(self.position.step)
                if action != "continue":
                    self._save()
                if action == "stop":
                    return False
                self.step(first.epoch, index)
            self._end_epoch()
        if self._config.checkpoint.at_end:
            self._save()
        notes.begin("the end")
        self._checkpointer.finish(mark_done)
        return True

    @property
    def records(self) -> Mapping[str, Digest]:
        """What rank 0 has recorded, by the name of the file; empty on other ranks."""
        return self._recorder.digests if self._recorder else {}

    def follow(self, show: Callable[[str, Mapping[str, Any]], None]) -> None:
        """Pass each row that is recorded from now on to ``show``, with the name of its record."""
        assert self._recorder
        self._recorder.show = show

    def close(self) -> None:
        """Close the files of records."""
        if self._recorder:
            self._recorder.close()

    def step(self, epoch: int, index: int) -> float:
        """Take one step, number ``index`` of an epoch, and return the loss of rank 0's batch."""
        notes.begin("step", self.position.step)
        started = time.perf_counter()
        at, every = self.position, self._config.measure_residual_every
        lr = learning_rate(self._config, epoch + index / self._workers.num_steps)
        reduced = self._workers.take_step(at.step, lr)
        loss = float(reduced.loss)  # host sync: for the record, and to include all work in the step's time
        ended = time.perf_counter()  # the cost of what is measured, recorded and saved from here on is the next step's
        step_s, wall_s = ended - started, ended - self._last_end
        self._last_end = ended
        self.position = Position(at.step + 1, epoch, index + 1, at.loss_sum + loss, at.time_s + wall_s)
        tested = self._tested(at.step)
        if self._recorder:
            row = step_row(at.step, epoch, loss, lr, reduced, step_s)
            row |= {"wall_s": wall_s, "time_s": self.position.time_s}
            norm = self._workers.residual_norm() if every and at.step % every == 0 else None
            self._recorder.append("steps", row | {"residual_norm": norm} | tested)
        return loss

    def _tested(self, step: int) -> dict[str, float]:
        """Return what the test set measures after every n-th step, else nothing."""
        every = self._config.measure_test_every
        if not every or (step + 1) % every:
            return {}
        return self._workers.task.measures(self._evaluate())

    def _evaluate(self) -> Tensor:
        """Return the sums of the test set over all ranks; the time that this takes is not that of training."""
        notes.begin("the evaluation")
        began = time.perf_counter()
        sums = self._workers.evaluate().cpu()
        self._last_end += time.perf_counter() - began
        return sums

    def _end_epoch(self) -> None:
        at = self.position
        sums = self._evaluate()
        row = {
            "epoch": at.epoch,
            "step": at.step,
            "time_s": at.time_s,
            "train_loss": at.loss_sum / self._workers.num_steps,
            **self._workers.task.measures(sums),
            "num_samples": int(sums[-1]),
            **speed_of_words(self._workers.task, at.step, at.time_s),
        }
        if self._recorder:
            self._recorder.append("epochs", row)
        self.position = Position(at.step, at.epoch + 1, 0, 0.0, at.time_s)

    def _save(self) -> None:
        """Save the run; batch-norm statistics are those of rank 0, as in DDP."""
        notes.begin("the checkpoint")
        if self._recorder:
            self._recorder.sync()  # a run cannot resume from a checkpoint whose rows are lost
        shared = {
            "model": self._workers.task.model.state_dict(),
            "optimizer": self._workers.optimizer_state,
            "num_steps": self._workers.num_steps,
            **({"groups": self.groups} if self.groups else {}),
        }
        self._checkpointer.save(self.position, shared, self.records)

    def _load(self, saved: Saved, *, of: object) -> None:
        """Take over a saved state. Raises: UserError where it is that of another training."""
        workers, before = self._workers, saved.shared["num_steps"]
        ranks = saved.ranks
        if before != workers.num_steps:  # other batches: carries do not fit them
            ranks = [{**own, "carry": None} for own in ranks]
        try:
            workers.task.model.load_state_dict(saved.shared["model"])
            workers.load_optimizer(saved.shared["optimizer"])
            workers.load_states(ranks)
            set_random_state(saved.random, workers.device)
        except UserError:
            raise
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            step = saved.position.step
            raise UserError(
                f"the checkpoint of step {step} of {of} does not fit this run: {one_line(error)}"
            ) from error
        at = saved.position
        if before != workers.num_steps:  # resume at the same fraction of the epoch
            index = min(at.index * workers.num_steps // before, workers.num_steps)
            at = Position(at.step, at.epoch, index, at.loss_sum * index / max(at.index, 1), at.time_s)
        self.position = at


def _groups_until_now(config: TrainConfig, saved: Saved | None, num_ranks: int) -> list[dict[str, int]]:
    """Return the groups in which a run was trained until ``saved``, and the present one; see Trainer."""
    if config.rounds.lost_workers == "stop":
        return []
    earlier = list(saved.shared.get("groups", ())) if saved else []
    if earlier and earlier[-1]["num_ranks"] == num_ranks:
        return earlier
    return [*earlier, {"step": saved.position.step if saved else 0, "num_ranks": num_ranks}]
