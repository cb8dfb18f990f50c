"""Save a run at intervals, stop it at a signal, and resume it from a checkpoint: the same on all ranks."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.config.errors import UserError
from experiments.config.identity import run_name
from experiments.config.schema import TrainConfig
from experiments.runs.checkpoint_folder import Checkpoint, part_path
from experiments.runs.checkpoint_parts import PartDigest, torn
from experiments.runs.checkpoints import Checkpoints, open_checkpoint
from experiments.runs.rewinding import Records
from experiments.runs.run_folder import RunFolder
from experiments.runs.stop_signals import stop_signals
from micro.checkpoints.resizing import average

Action = Literal["continue", "save", "stop"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run: before step ``index`` of ``epoch``.

    Attributes:
        step: steps done since the start.
        epoch, index: the epoch of the next step, and its number in the epoch.
        loss_sum: sum of rank 0's losses in this epoch.
        time_s: seconds that the steps took.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    loss_sum: float = 0.0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a run that a checkpoint holds.

    Attributes:
        position: of the run when it was saved.
        shared: model and optimizer, which are equal on all ranks.
        ranks: the state of each rank of this process, in order.
        random: state of this process's random generators, None if they are seeded again.
        world_size: of the run that saved it.
        ends: where the rows that were recorded until then end in each file of records; empty for another run's.
        records: what was recorded until then.
        is_torn: whether those rows are damaged.
        passed_over: for each newer checkpoint that could not be used, one line with the reason.
    """

    position: Position
    shared: dict[str, Any]
    ranks: list[dict[str, Any]]
    random: dict[str, Tensor] | None
    world_size: int
    ends: Mapping[Path, int] = field(default_factory=dict)
    records: Records | None = None
    is_torn: bool = False
    passed_over: tuple[str, ...] = ()


class NoWholeCheckpoint(UserError):
    """A run that has checkpoints, none of which can be used.

    Args:
        reasons: one line for each.
        torn: those of which only the rows are damaged, newest first.
    """

    def __init__(self, path: Path, reasons: Sequence[str], torn: Sequence[Checkpoint]) -> None:
        super().__init__(path, reasons, torn)
        self.path, self.reasons, self.torn = path, reasons, torn

    def __str__(self) -> str:
        go_on = ", or from=torn to go on without these rows, as a run that is not whole" if self.torn else ""
        return (
            f"no checkpoint of {self.path} can be used: {'; '.join(self.reasons)}; "
            f"add from=scratch to start anew (what is there moves to attempts/){go_on}"
        )


class Workers(Protocol):
    """What checkpointing needs of the workers of this process; see experiments.training.workers."""

    is_main: bool

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of this process."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    def agree(self, item: Any) -> list[Any]:
        """Return the item of every process of the run, in rank order."""

    def states(self) -> list[dict[str, Any]]:
        """Return the state of each rank of this process."""


class Checkpointer:
    """Decide when to save and when to stop, and save the run. All ranks do the same before the same step.

    A rank that received a signal, or rank 0 when it is time to save, writes a note for the next step into the store. No
    rank takes that step before all ranks have begun this one, so all ranks read the same note. This costs one read of
    the store per step, and no collective.

    Args:
        store: the key-value store that the ranks share; None if this process holds all ranks.

    Raises:
        UserError: a node does not see the run's folder.
    """

    def __init__(self, config: TrainConfig, workers: Workers, folder: RunFolder, store: dist.Store | None) -> None:
        self._config, self._workers, self._store = config.checkpoint, workers, store
        self._from = config.from_
        self._world_size = config.world_size
        self._folder = folder
        self._files = Checkpoints(
            folder.checkpoints_path, run=run_name(config), world_size=config.world_size, keep=self._config.keep
        )
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
        self._leave_note(step + 1)
        return note if note != "continue" else self._by_steps(step)

    def save(self, position: Position, shared: dict[str, Any], records: Records | None = None) -> None:
        """Save every rank's state.

        Args:
            shared: the state that is equal on all ranks; rank 0's is saved.
            records: what rank 0 has recorded until now; others give None.

        Raises:
            UserError: on all ranks, if one rank could not write, or another process has taken over the folder.
        """
        draft = self._as_owner(lambda: self._files.begin(position.step))
        try:
            written = self._everywhere(lambda: self._write(draft, {"position": asdict(position), **shared}))
        except UserError:
            self._as_owner(lambda: self._files.discard(draft))
            raise
        digests = [part for parts in written for part in parts]
        self._as_owner(lambda: self._files.publish(draft, position.step, digests, records))
        self._saved_at = time.monotonic()

    def beginning(self) -> tuple[Saved | None, Sequence[str]]:
        """Return the checkpoint that the run resumes from, None for a start from step 0, and why others are not used.

        Where none can be used, the setting ``from`` decides: scratch puts all of them aside, torn takes the newest one
        of which only the rows are damaged.

        Raises:
            NoWholeCheckpoint: none can be used, and nothing else was chosen.
        """
        try:
            saved = self.newest()
        except NoWholeCheckpoint as error:
            if self._from == "scratch":
                self._as_owner(self._folder.set_aside_checkpoints)
                return None, error.reasons
            saved = self._first_readable(error.torn) if self._from == "torn" else None
            if saved is None:
                raise
            return replace(saved, is_torn=True), error.reasons
        return saved, saved.passed_over if saved else ()

    def newest(self) -> Saved | None:
        """Return the newest checkpoint that every rank can read, the same on all ranks; None if there never was one.

        The rows that were recorded until then are whole.

        Raises:
            NoWholeCheckpoint: there are some, and none can be used.
        """
        candidates, torn, passed_over = self._on_main(self._with_rows)
        for checkpoint, ends in candidates:
            saved, problem = _attempt(lambda chosen=checkpoint: _read(chosen, self._workers))  # type: ignore[misc]
            problems = [str(found) for found in self._workers.agree(problem) if found]
            if saved and not problems:
                return replace(saved, ends=ends, passed_over=tuple(passed_over))
            passed_over.append(problems[0])
        if passed_over:
            raise NoWholeCheckpoint(self._folder.path, passed_over, torn)
        return None

    def _first_readable(self, checkpoints: Sequence[Checkpoint]) -> Saved | None:
        for checkpoint in checkpoints:
            saved, problem = _attempt(lambda chosen=checkpoint: _read(chosen, self._workers))  # type: ignore[misc]
            problems = [found for found in self._workers.agree(problem) if found]
            if saved and not problems:
                return saved
        return None

    def _with_rows(self) -> tuple[list[tuple[Checkpoint, dict[Path, int]]], list[Checkpoint], list[str]]:
        """Return the checkpoints whose rows are whole, with the end of those rows; the others; why none of the others.

        Newest first.
        """
        found, torn, problems = [], [], self._files.problems()
        for checkpoint in self._files.candidates():
            ends, problem = _attempt(lambda at=checkpoint: self._folder.check_rows(at.step, at.records))  # type: ignore[misc]
            if ends is None:
                problems.append(f"{checkpoint.path.name}: {problem}")
                torn.append(checkpoint)
            else:
                found.append((checkpoint, ends))
        return found, torn, problems

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of steps after ``step``, from which the run resumes."""
        self._as_owner(lambda: self._files.remove_after(step))

    def finish(self, mark_done: Callable[[], None]) -> None:
        """Remove the checkpoints of a finished run, after rank 0 has marked it: a kill at any moment loses nothing."""

        def mark_and_remove() -> None:
            mark_done()
            self._files.remove_all()

        self._as_owner(mark_and_remove)

    def _write(self, draft: Path, shared: dict[str, Any]) -> list[PartDigest]:
        random = random_state(self._workers.device)
        return [
            self._files.write_part(draft, rank, {"own": own, "random": random, "shared": shared if rank == 0 else None})
            for rank, own in zip(self._workers.ranks, self._workers.states(), strict=True)
        ]

    def _everywhere(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` in each process and return all results; an error in one process is raised in all."""
        outcomes = self._workers.agree(_attempt(work))
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
        for rank, sees in enumerate(self._workers.agree(folder.config_path.exists())):
            if not sees:
                raise UserError(
                    f"rank {rank} does not see {folder.path}, where checkpoints go: put output on a disk that all "
                    "nodes share, or set checkpoint.every_s=0 checkpoint.every_steps=0"
                )

    # Notes to the other ranks

    def _note(self, step: int) -> Action:
        """Return the action that a rank noted for this step during the previous step."""
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


def read_start_from(config: TrainConfig, workers: Workers) -> Saved | None:
    """Return the checkpoint that ``start_from`` names, for this run's workers; None if it is not set.

    With another number of workers, each worker starts with the mean of all residuals. The model is updated by the mean
    over workers, so the total that is still to be sent stays the same. Thresholds, boundaries and the carried states of
    texts are initialized again, and the run resumes at the same fraction of the epoch.

    Raises:
        UserError: there is no complete checkpoint, or it has another number of workers and resize is not average.
    """
    if config.start_from is None:
        return None
    checkpoint = open_checkpoint(Path(config.start_from))
    if checkpoint.world_size == config.world_size:
        return _read(checkpoint, workers)
    if config.resize == "refuse":
        raise UserError(
            f"start_from={config.start_from} had {checkpoint.world_size} workers, this run has {config.world_size}: "
            "make them equal, or set resize=average"
        )
    parts = _read_parts(checkpoint, range(checkpoint.world_size))
    states = average([part["own"] for part in parts.values()], config.world_size)
    own = [{**states[rank], "carry": None} for rank in workers.ranks]
    return _saved(parts[0]["shared"], own, None, checkpoint.world_size)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the torch generators that a step may use."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, Tensor] | None, device: torch.device) -> None:
    """Restore the state that ``random_state`` returned."""
    if states is None:
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _read(checkpoint: Checkpoint, workers: Workers) -> Saved:
    parts = _read_parts(checkpoint, sorted({0, *workers.ranks}))
    own = [parts[rank]["own"] for rank in workers.ranks]
    saved = _saved(parts[0]["shared"], own, parts[workers.ranks[0]]["random"], checkpoint.world_size)
    return replace(saved, records=checkpoint.records)


def _read_parts(checkpoint: Checkpoint, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return what these ranks saved. Raises: TornCheckpoint, also where a part holds no such state."""
    parts = {rank: Checkpoints.read_part(checkpoint, rank) for rank in ranks}
    for rank, part in parts.items():
        problem = _foreign(part, {"own", "random", "shared"})
        if not problem and rank == 0:
            problem = _foreign(part["shared"], {"model", "optimizer", "num_steps", "position"})
            problem = problem or _foreign(part["shared"]["position"], set(Position.__slots__))
        if problem:
            raise torn(part_path(checkpoint.path, rank), f"it is no part of a run's checkpoint: {problem}")
    return parts


def _foreign(found: Any, keys: set[str]) -> str:
    """Return what keeps a value from being a mapping with these keys; empty where nothing does."""
    if not isinstance(found, dict):
        return f"a value of type {type(found).__name__} where {', '.join(sorted(keys))} are expected"
    missing = sorted(keys - found.keys())
    return f"{', '.join(missing)} missing" if missing else ""


def _saved(
    shared: dict[str, Any], ranks: list[dict[str, Any]], random: dict[str, Tensor] | None, world_size: int
) -> Saved:
    shared = dict(shared)
    return Saved(Position(**shared.pop("position")), shared, ranks, random, world_size)


def _attempt(work: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """Return what ``work`` returns and None, or None and its UserError."""
    try:
        return work(), None
    except UserError as error:
        return None, error
