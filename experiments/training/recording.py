"""Compute the records of each step and epoch, on rank 0."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import micro
from experiments.runs.files import Digest
from experiments.runs.records import RecordWriter
from experiments.runs.run_folder import RunFolder
from experiments.training.tasks import Task
from experiments.training.workers import Reduced
from micro.local import RoundStats

BACKWARD = 3  # forward and backward take three times as many operations as forward
_CHOSEN = (  # of a step that reduces nothing, as those within a round: null
    *("rule", "target_density", "density", "local_density", "density_error", "build_up", "imbalance"),
    *("threshold", "relative_error", "forgotten"),
)


class Recorder:
    """Rank 0's records of a run: ``steps`` and ``epochs``.

    Args:
        kept: what stays of each record, by the name of the file; the rest is dropped.

    Attributes:
        show: is given each row, with the name of its record, after it was written.
    """

    def __init__(self, folder: RunFolder, kept: Mapping[str, Digest]) -> None:
        self.show: Callable[[str, Mapping[str, Any]], None] = lambda kind, row: None
        paths = {"steps": folder.steps_path, "epochs": folder.epochs_path}
        self._writers = {kind: RecordWriter(path, kept.get(path.name, Digest())) for kind, path in paths.items()}

    def append(self, kind: str, row: dict[str, Any]) -> None:
        """Append a row to a record. Raises: CannotWrite."""
        self._writers[kind].append(row)
        self.show(kind, row)

    def sync(self) -> None:
        """Flush all rows to the disk."""
        for writer in self._writers.values():
            writer.sync()

    @property
    def digests(self) -> dict[str, Digest]:
        """What each record has, by the name of its file."""
        return {writer.path.name: writer.digest for writer in self._writers.values()}

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()


def step_row(step: int, epoch: int, loss: float, lr: float, reduced: Reduced, step_s: float) -> dict[str, Any]:
    """Return the record of a step, summed over its buckets."""
    stats = reduced.stats
    select_s, exchange_s = sum(s.select_s for s in stats), sum(s.exchange_s for s in stats)
    work_s = select_s + exchange_s + sum(s.rest_s for s in stats)
    exposed = min(1.0, reduced.exposed_s / work_s) if work_s else 0.0  # the share of it that backward did not hide
    select_s, exchange_s = exposed * select_s, exposed * exchange_s
    buffers = sum(ended.buffer_bytes for ended in reduced.rounds)
    return {
        "step": step,
        "epoch": epoch,
        "loss": loss,
        "lr": lr,
        **(_chosen(stats) if stats else dict.fromkeys(_CHOSEN)),
        "bytes_sent": sum(s.bytes_sent for s in stats) + buffers,
        "counts_bytes": sum(s.counts_bytes for s in stats),
        "indices_bytes": sum(s.indices_bytes for s in stats),
        "values_bytes": sum(s.values_bytes for s in stats) + buffers,
        "num_collectives": sum(s.num_collectives for s in stats),
        **_round(reduced.rounds),
        "compute_s": reduced.compute_s,
        "forward_s": reduced.forward_s,
        "select_s": select_s,
        "exchange_s": exchange_s,
        "hidden_s": (1 - exposed) * work_s,
        "load_s": reduced.load_s,
        "rest_s": max(step_s - reduced.compute_s - select_s - exchange_s, 0.0),
        "step_s": step_s,
        "skipped": any(s.skipped for s in stats),
    }


def _chosen(stats: Sequence[micro.StepStats]) -> dict[str, Any]:
    """Return what a step's reduction chose and updated."""
    numel = sum(s.num_choices for s in stats)
    target = sum(s.target_count for s in stats)
    updated = sum(s.global_count for s in stats)
    forgotten = [s.forgotten for s in stats if s.forgotten is not None]
    first: micro.StepStats = stats[0]
    return {
        "rule": first.rule,
        "target_density": target / numel,
        "density": updated / numel,
        "local_density": sum(s.local_count for s in stats) / numel,
        "density_error": abs(updated / target - 1),
        "build_up": updated / target,
        "imbalance": first.imbalance,
        "threshold": first.threshold,
        "relative_error": first.relative_error,
        "forgotten": math.hypot(*forgotten) if forgotten else None,  # the norm of all vectors together
    }


def _round(rounds: Sequence[RoundStats]) -> dict[str, Any]:
    """Return what the last exchange reports that the step has ended; nulls where it has ended none."""
    keys = ("round", "fragment", "moved_norm", "update_norm", "cosine", "drift")
    if not rounds:
        return dict.fromkeys(keys)
    last = rounds[-1]
    values = (last.round, last.fragment, last.own_norm, last.mean_norm, last.cosine, last.drift)
    return dict(zip(keys, values, strict=True))


def speed_of_words(task: Task, num_steps: int, seconds: float) -> dict[str, float]:
    """Return the words in a second since the start of a run, and the model FLOPs utilisation; nothing without words.

    That is the arithmetic of forward and backward, as the model counts it, over what the devices could have done in the
    time of all steps (``peak_tflops``), communication and drawing of batches included. The attention of a causal model
    counts as a whole, and what is computed twice to save memory counts once.

    Source: Chowdhery et al., PaLM, 2022, arXiv 2204.02311, appendix B.
    """
    config, words = task.config, task.words_per_batch
    if not words or not num_steps or not seconds:
        return {}
    speed = num_steps * config.world_size * config.accumulate * words / seconds
    if config.peak_tflops is None:
        return {"words_per_s": speed}
    num_devices = 1 if config.cluster.simulated else config.world_size  # simulated workers share one
    used = BACKWARD * task.model.flops_per_word(config.dataset.sequence_length) * speed  # type: ignore[operator]
    return {"words_per_s": speed, "mfu": used / (config.peak_tflops * 1e12 * num_devices)}
