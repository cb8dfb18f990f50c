"""Save a run at intervals, stop it on a signal, and resume it from a checkpoint, equally on all ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.config.stopping import stop_signals
from experiments.runs import checkpoints
from experiments.runs.files import Digest
from experiments.runs.rank_files import Position, Saved, Workers, random_state, read_state, write_rank
from experiments.runs.run_folder import RunFolder

Action = Literal["continue", "save", "stop"]
T = TypeVar("T")


class Checkpointer:
    """Decide when to save and when to stop, and save the run. All ranks do the same before the same step.

    A rank that received a signal, or rank 0 when it is time to save, writes a note for the next step into the store. No
    rank takes that step before all ranks have begun this one, so all ranks read the same note. Within a round of local
    steps ranks do not wait for each other: there the note is for the step after the next exchange. This costs one read
    of the store per step, and no collective. There is no store where this process holds all ranks.

    Raises: UserError: a node does not see the run's folder.
    """

    def __init__(self, config: TrainConfig, workers: Workers, folder: RunFolder, store: dist.Store | None) -> None:
        self._every_s, self._every_steps = config.checkpoint.every_s, config.checkpoint.every_steps
        if config.rounds.lost_workers != "stop":  # who is left goes on from the end of a round
            self._every_s, self._every_steps = 0.0, config.rounds.every
        self._config, self._workers, self._folder, self._store = config, workers, folder, store
        self._saved_step: int | None = None  # of the newest checkpoint
        self._saved_at = time.monotonic()
        self._first_step: int | None = None
        if self._every_s or self._every_steps or config.checkpoint.at_end:
            seen = workers.gather_items(folder.config_path.exists())
            if not all(seen):
                raise UserError(
                    f"rank {seen.index(False)} does not see {folder.path}, where checkpoints go: put output on a disk "
                    "that all nodes share, or set checkpoint.every_s=0 checkpoint.every_steps=0 checkpoint.at_end=false"
                )

    def next_action(self, step: int) -> Action:
        """Return what to do before ``step``, the same on all ranks; call it once before each."""
        self._first_step = step if self._first_step is None else self._first_step
        noted = self._request() if self._store is None else self._exchange_notes(self._store, step)
        by_steps = self._every_steps and step % self._every_steps == 0 and step != self._first_step
        return "save" if noted == "continue" and by_steps else noted

    def save(self, position: Position, shared: dict[str, Any], records: Mapping[str, Digest]) -> None:
        """Save every rank's state, and what is equal on all ranks of rank 0, with what rank 0 has of each record.

        Raises: UserError: on all ranks, if one could not write, or another process has taken over the folder.
        """
        step, workers = position.step, self._workers
        if step == self._saved_step:  # a run that stops where it began
            return
        draft = self._as_owner(lambda: checkpoints.begin(self._folder))
        shared = {"position": asdict(position), **shared}

        def write() -> list[Digest]:
            random = random_state(workers.device)
            return [
                write_rank(draft, rank, {"own": own, "random": random, "shared": None if rank else shared})
                for rank, own in zip(workers.ranks, workers.states(), strict=True)
            ]

        try:
            ranks = [digest for written in self._everywhere(write) for digest in written]
            more = {"epoch": position.epoch, "keep": self._config.checkpoint.keep}
            self._as_owner(lambda: checkpoints.publish(self._folder, draft, step, ranks, records, **more))
        except UserError:
            if workers.is_main:
                checkpoints.discard(draft)
            raise
        self._saved_step, self._saved_at = step, time.monotonic()

    def resume(self) -> tuple[Saved | None, Sequence[str]]:
        """Return the newest whole checkpoint, from which the run resumes, and a line for each that is not used.

        It is None for a start from step 0: without any checkpoint or, where none can be used, with ``resume=scratch``.
        All others that are newer are removed: the run will write them again. Raises: UserError: none can be used.
        """
        candidates, problems = self._as_owner(lambda: checkpoints.usable(self._folder))
        for checkpoint in candidates:
            saved, problem = _attempt(partial(read_state, checkpoint, self._workers))
            found = [str(each) for each in self._workers.gather_items(problem) if each]
            if saved and not found:
                self._saved_step = saved.position.step
                self._as_owner(partial(checkpoints.remove_after, self._folder, saved.position.step))
                return saved, problems
            problems.append(found[0])
        if problems and self._config.resume != "scratch":
            raise UserError(
                f"no checkpoint of {self._folder.path} can be used: {'; '.join(problems)}; "
                "add resume=scratch to start again (what is there moves to attempts/)"
            )
        if problems:
            self._as_owner(self._folder.set_aside_records)
        return None, problems

    def finish(self, mark_done: Callable[[], None]) -> None:
        """Mark a run as done on rank 0, then remove its checkpoints: a kill at any moment loses nothing."""

        def mark_and_remove() -> None:
            mark_done()
            checkpoints.remove_leftovers(self._folder)

        self._as_owner(mark_and_remove)

    def _everywhere(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` in each process and return all results; an error in one process is raised in all."""
        outcomes = self._workers.gather_items(_attempt(work))
        for _, problem in outcomes:
            if problem:
                raise problem
        return [result for result, _ in outcomes]

    def _as_owner(self, work: Callable[[], T]) -> T:
        """Call ``work`` in rank 0's process; return its result, or raise its error, in all processes.

        Where another process has taken over the folder, the error that says so is raised instead.
        """

        def check_and_work() -> T | None:
            if not self._workers.is_main:
                return None
            self._folder.check_owned()
            return work()

        return self._everywhere(check_and_work)[0]  # type: ignore[return-value]

    def _exchange_notes(self, store: dist.Store, step: int) -> Action:
        """Return the action that a rank noted for this step, and note this rank's request; see the class."""
        found = store.get(f"before/{step}").decode() if store.check([f"before/{step}"]) else "continue"
        request = self._request()
        if request == "stop" or (request == "save" and self._workers.is_main):
            every = max(1, self._config.rounds.every)
            store.set(f"before/{(step // every + 1) * every + self._config.rounds.delay}", request)
        return found  # type: ignore[return-value]

    def _request(self) -> Action:
        if stop_signals.number:
            return "stop"
        is_time = self._every_s and time.monotonic() - self._saved_at >= self._every_s
        return "save" if is_time else "continue"


def _attempt(work: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """Return what ``work`` returns and None, or None and its UserError."""
    try:
        return work(), None
    except UserError as error:
        return None, error
