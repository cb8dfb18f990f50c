"""Save a run at intervals, stop it at a signal, and resume it from a checkpoint: the same on all ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from experiments.config.errors import UserError
from experiments.config.schema import CheckpointConfig, TrainConfig
from experiments.runs import checkpoints
from experiments.runs.atomic_files import Digest
from experiments.runs.checkpoints import Checkpoint
from experiments.runs.rank_files import write_rank
from experiments.runs.records import Extent
from experiments.runs.run_folder import RunFolder
from experiments.runs.saved_state import Position, Saved, Workers, random_state, read_state
from experiments.runs.stop_signals import stop_signals

Action = Literal["continue", "save", "stop"]
T = TypeVar("T")


class Checkpointer:
    """Decide when to save and when to stop, and save the run. All ranks do the same before the same step.

    A rank that received a signal, or rank 0 when it is time to save, writes a note for the next step into the store. No
    rank takes that step before all ranks have begun this one, so all ranks read the same note. Within a round of local
    steps ranks do not wait for each other: there the note is for the step after the next exchange. This costs one read
    of the store per step, and no collective.

    Args:
        store: the key-value store that the ranks share; None if this process holds all ranks.

    Raises:
        UserError: a node does not see the run's folder.
    """

    def __init__(self, config: TrainConfig, workers: Workers, folder: RunFolder, store: dist.Store | None) -> None:
        self._config, self._workers, self._store = _frequency(config), workers, store
        self._round, self._delay = max(1, config.rounds.every), config.rounds.delay
        self._resume, self._folder = config.resume, folder
        self._saved_step: int | None = None  # of the newest checkpoint
        self._saved_at = time.monotonic()
        self._first_step: int | None = None
        if self._config.every_s or self._config.every_steps:
            self._check_shared(folder)

    def next_action(self, step: int) -> Action:
        """Return what to do before ``step``, the same on all ranks; call it once before each."""
        self._first_step = step if self._first_step is None else self._first_step
        if self._store is None:
            return "stop" if stop_signals.number else self._by_time_or_steps(step)
        note = self._note(step)
        self._leave_note((step // self._round + 1) * self._round + self._delay)
        return note if note != "continue" else self._by_steps(step)

    def save(self, position: Position, shared: dict[str, Any], records: Mapping[str, Extent]) -> None:
        """Save every rank's state.

        Args:
            shared: the state that is equal on all ranks; rank 0's is saved.
            records: what rank 0 has on the disk of each record; empty on other ranks.

        Raises:
            UserError: on all ranks, if one rank could not write, or another process has taken over the folder.
        """
        step = position.step
        if step == self._saved_step:  # a run that stops where it began
            return
        draft = self._as_owner(lambda: checkpoints.begin(self._folder, step))
        try:
            written = self._everywhere(lambda: self._write(draft, {"position": asdict(position), **shared}))
            ranks = [digest for digests in written for digest in digests]
            self._as_owner(
                lambda: checkpoints.publish(self._folder, draft, step, ranks, records, keep=self._config.keep)
            )
        except UserError:
            self._on_main(lambda: checkpoints.discard(draft))
            raise
        self._saved_step, self._saved_at = step, time.monotonic()

    def resume(self) -> tuple[Saved | None, Sequence[str]]:
        """Return the newest whole checkpoint, from which the run resumes, and a line for each that is not used.

        It is None for a start from step 0: without any checkpoint or, where none can be used, with ``resume=scratch``.
        All others that are newer are removed: the run will write them again.

        Raises:
            UserError: there are some, and none can be used.
        """
        candidates, problems = self._on_main(lambda: checkpoints.usable(self._folder))
        saved = self._first_readable(candidates, problems)
        if saved:
            step = self._saved_step = saved.position.step
            self._as_owner(lambda: checkpoints.remove_after(self._folder, step))
            return saved, problems
        if problems and self._resume != "scratch":
            raise UserError(
                f"no checkpoint of {self._folder.path} can be used: {'; '.join(problems)}; "
                "add resume=scratch to start again (what is there moves to attempts/)"
            )
        if problems:
            self._as_owner(self._folder.set_aside_records)
        return None, problems

    def _first_readable(self, candidates: Sequence[Checkpoint], problems: list[str]) -> Saved | None:
        """Return the first checkpoint that every rank can read; a line is added to ``problems`` for those before it."""
        for checkpoint in candidates:
            saved, problem = _attempt(lambda chosen=checkpoint: read_state(chosen, self._workers))  # type: ignore[misc]
            found = [str(each) for each in self._workers.gather_items(problem) if each]
            if saved and not found:
                return saved
            problems.append(found[0])
        return None

    def finish(self, mark_done: Callable[[], None]) -> None:
        """Remove the checkpoints of a finished run, after rank 0 has marked it: a kill at any moment loses nothing."""

        def mark_and_remove() -> None:
            mark_done()
            checkpoints.remove_all(self._folder)

        self._as_owner(mark_and_remove)

    def _write(self, draft: Path, shared: dict[str, Any]) -> list[Digest]:
        random = random_state(self._workers.device)
        return [
            write_rank(draft, rank, {"own": own, "random": random, "shared": shared if rank == 0 else None})
            for rank, own in zip(self._workers.ranks, self._workers.states(), strict=True)
        ]

    def _everywhere(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` in each process and return all results; an error in one process is raised in all."""
        outcomes = self._workers.gather_items(_attempt(work))
        for _, problem in outcomes:
            if problem:
                raise problem
        return [result for result, _ in outcomes]

    def _on_main(self, work: Callable[[], T]) -> T:
        """Call ``work`` in rank 0's process; return its result, or raise its error, in all processes."""
        return self._everywhere(lambda: work() if self._workers.is_main else None)[0]  # type: ignore[return-value]

    def _as_owner(self, work: Callable[[], T]) -> T:
        """As ``_on_main``; where another process has taken over the folder, raise the error that says so instead."""

        def check_and_work() -> T:
            self._folder.check_owned()
            return work()

        return self._on_main(check_and_work)

    def _check_shared(self, folder: RunFolder) -> None:
        for rank, sees in enumerate(self._workers.gather_items(folder.config_path.exists())):
            if not sees:
                raise UserError(
                    f"rank {rank} does not see {folder.path}, where checkpoints go: put output on a disk that all "
                    "nodes share, or set checkpoint.every_s=0 checkpoint.every_steps=0"
                )

    # Notes to the other ranks

    def _note(self, step: int) -> Action:
        """Return the action that a rank noted for this step."""
        assert self._store is not None
        if not self._store.check([f"before/{step}"]):
            return "continue"
        return "stop" if self._store.get(f"before/{step}") == b"stop" else "save"

    def _leave_note(self, step: int) -> None:
        """Note the action that this rank requests before ``step``; an overwritten request is repeated a step later."""
        assert self._store is not None
        if stop_signals.number:
            self._store.set(f"before/{step}", "stop")
        elif self._workers.is_main and self._time_to_save():
            self._store.set(f"before/{step}", "save")

    def _by_time_or_steps(self, step: int) -> Action:
        return "save" if self._time_to_save() else self._by_steps(step)

    def _time_to_save(self) -> bool:
        return bool(self._config.every_s) and time.monotonic() - self._saved_at >= self._config.every_s

    def _by_steps(self, step: int) -> Action:
        every = self._config.every_steps
        return "save" if every and step % every == 0 and step != self._first_step else "continue"


def _frequency(config: TrainConfig) -> CheckpointConfig:
    """Return when a run is saved: at the end of every round where it goes on without lost workers."""
    if config.rounds.lost_workers == "stop":
        return config.checkpoint
    return replace(config.checkpoint, every_s=0.0, every_steps=config.rounds.every)


def _attempt(work: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """Return what ``work`` returns and None, or None and its UserError."""
    try:
        return work(), None
    except UserError as error:
        return None, error
