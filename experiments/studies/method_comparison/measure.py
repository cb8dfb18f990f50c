"""Run every method on the same gradients, a trial per core at a time; the failure of one costs the others nothing."""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import micro
from experiments.config.errors import UserError
from experiments.studies.gradient_sources import RECORDED, TITLES, Gradients, check_size, synthetic
from experiments.studies.method_comparison.equal_bytes import match_bytes
from experiments.studies.method_comparison.kept import KeptResults
from experiments.studies.method_comparison.processes import Call, Failed, processes, results, usable_cores
from experiments.studies.method_comparison.settings import ComparisonSettings
from experiments.studies.method_comparison.trial import Row, one_thread, trial
from experiments.studies.methods import build_methods
from experiments.studies.recorded_gradients import numel_of, record, training_config
from experiments.studies.selection_times import TIMES, reference_times, time_selection, timing_gradient
from micro import kernels

WORTH_PROCESSES = 2e9  # elements of gradients over all trials, from where processes of their own gain
Methods = dict[str, micro.Reducer]
ShowProgress = Callable[[str, int], None]  # of the task that ended, and of how many there are


@dataclass(slots=True)
class Comparison:
    """What was measured so far.

    Attributes:
        rows: one per method, stream and world size.
        steps: one per step of these.
        times: of selection, one per method and length.
        tradeoffs: rows like those above, of further densities.
        matches: densities at which methods send as much as another one.
        failures: what went wrong, one line each.
        interrupted: the user stopped it.
    """

    rows: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    times: list[Row] = field(default_factory=list)
    matches: list[Row] = field(default_factory=list)
    tradeoffs: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def timed(self) -> pd.DataFrame:
        """The times of selection; columns method, numel, TIMES."""
        return pd.DataFrame(self.times, columns=["method", "numel", *TIMES])

    def add(self, kind: str, result: Any) -> None:
        """Add the result of a task, whose kind is the list that it belongs to."""
        if kind in ("rows", "tradeoffs"):
            row, steps = result
            getattr(self, kind).append(row)
            self.steps += steps if kind == "rows" else []
        else:
            getattr(self, kind).extend(result)


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement.

    Attributes:
        name: for the user; no other measurement of the comparison has it.
        kind: the list of Comparison that its result belongs to.
        call: measures; can be pickled.
    """

    name: str
    kind: str
    call: Call


class Runner:
    """Carries out tasks that have no result yet, and keeps each result as it comes.

    Args:
        total: number of tasks that will come.
    """

    def __init__(self, kept: KeptResults, show_progress: ShowProgress, total: int) -> None:
        self._kept, self._show, self._total = kept, show_progress, total
        self._tasks: list[Task] = []
        self._failed: dict[str, str] = {}

    def run(
        self, tasks: Sequence[Task], prepare: Callable[[], None], *, pool: ProcessPoolExecutor | None = None
    ) -> None:
        """Carry out tasks; ``prepare`` is called first where one of them has no result."""
        self._tasks += tasks
        left = [task for task in tasks if task.name not in self._kept.results]
        for task in tasks:
            if task not in left:
                self._show(task.name, self._total)
        if left:
            prepare()
        for place, result in results(pool, [task.call for task in left]):
            name = left[place].name
            if isinstance(result, Failed):
                self._failed[name] = result.reason
            else:
                self._kept.add(name, result)
            self._show(name, self._total)

    def comparison(self) -> Comparison:
        """Return what all tasks gave so far, in their order."""
        done = Comparison()
        for task in self._tasks:
            if task.name in self._failed:
                done.failures.append(f"failed: {task.name}: {self._failed[task.name]}")
            elif task.name in self._kept.results:
                done.add(task.kind, self._kept.results[task.name])
        return done


def measure(settings: ComparisonSettings, show_progress: ShowProgress, kept: KeptResults) -> Comparison:
    """Run all methods on all streams and world sizes, and time their selection; Ctrl-C ends it early.

    Args:
        kept: what is among these is not measured again; what is measured is added.

    Raises:
        UserError: gradients that cannot be recorded, or that need more memory than allowed.
    """
    _check(settings)
    kernels.prepare()
    runner = Runner(kept, show_progress, num_tasks(settings))
    methods = build_methods(settings.methods, settings.density)
    failures, interrupted = [], False
    try:
        with tempfile.TemporaryDirectory(prefix="micro-compare-") as folder, processes(num_processes(settings)) as pool:
            for stream in settings.streams:
                path = Path(folder) / stream
                run = partial(runner.run, prepare=partial(_make_file, stream, settings, path), pool=pool)
                run(_trials(settings, methods, stream, path))
                if stream == settings.streams[-1]:
                    run(_tradeoffs(settings, path))
                    run(_matches(settings, path))
                path.unlink(missing_ok=True)
        for numel in settings.selection_lengths:  # with nothing beside them
            runner.run(_selection_times(settings, methods, numel), lambda: None)
    except KeyboardInterrupt:
        interrupted = True
    except BrokenProcessPool:
        failures.append("failed: a process was killed, perhaps for want of memory; the same command does what is left")
    done = runner.comparison()
    done.failures += failures
    done.interrupted = interrupted
    return done


def num_processes(settings: ComparisonSettings) -> int:
    """Return how many processes the trials are worth: one per core, each of which takes seconds to start."""
    sizes = sum(settings.world_sizes) * settings.num_steps * settings.numel * len(settings.methods)
    return len(usable_cores()) if sizes * len(settings.streams) > WORTH_PROCESSES else 1


def num_tasks(settings: ComparisonSettings) -> int:
    """Return the number of measurements."""
    trials = len(settings.streams) * len(settings.world_sizes) + len(settings.densities) + bool(settings.equal_bytes)
    return trials * len(settings.methods) + len(settings.selection_lengths) * (len(settings.methods) + 1)


def _check(settings: ComparisonSettings) -> None:
    """Check what the gradients need before the first is drawn. Raises: UserError as measure does."""
    world_size, words = max(settings.world_sizes), list(settings.recorded_training)
    if set(settings.streams) != {RECORDED}:
        check_size(settings.num_steps, world_size, settings.numel, settings.max_gb)
    if RECORDED in settings.streams:
        config = training_config(words, world_size)
        check_size(settings.num_steps, world_size, numel_of(config), settings.max_gb)
    elif words:
        raise UserError(f"'{words[0]}' is for the stream recorded: add it to --streams, or leave out the settings")
    longest = max(settings.selection_lengths, default=0)
    if 4e-9 * longest > settings.max_gb:
        raise UserError(
            f"--select-numel {longest} is more than --max-gb {settings.max_gb:g} allows: change one of them"
        )


def _make_file(stream: str, settings: ComparisonSettings, path: Path) -> None:
    """Write the gradients of a stream to a file, unless it is there, which all processes map into their memory.

    They are drawn or recorded with one thread: its number changes a training's sums.
    """
    if path.exists():
        return
    world_size, num_steps, max_gb = max(settings.world_sizes), settings.num_steps, settings.max_gb
    with one_thread():
        if stream == RECORDED:
            words = list(settings.recorded_training)
            made = record(words, num_steps=num_steps, world_size=world_size, max_gb=max_gb)
        else:
            made = synthetic(
                stream,
                numel=settings.numel,
                num_steps=num_steps,
                world_size=world_size,
                density=settings.density,
                seed=settings.seed,
                max_gb=max_gb,
            )
    torch.save(made, path)


@lru_cache(maxsize=1)
def _read_file(path: Path) -> Gradients:
    made: Gradients = torch.load(path, mmap=True, weights_only=False)
    return made


def _trials(settings: ComparisonSettings, methods: Methods, stream: str, path: Path) -> list[Task]:
    return [
        Task(_trial_name(name, stream, world_size), "rows", partial(_trial, path, name, reducer, world_size))
        for world_size in settings.world_sizes
        for name, reducer in methods.items()
    ]


def _trial_name(method: str, stream: str, world_size: int) -> str:
    return f"{method} on {TITLES[stream]} gradients, {world_size} workers"


def _trial(path: Path, method: str, reducer: micro.Reducer, world_size: int) -> tuple[Row, list[Row]]:
    return trial(method, reducer, _read_file(path), world_size=world_size)


def _tradeoffs(settings: ComparisonSettings, path: Path) -> list[Task]:
    """Return runs of all methods at the further densities, with as many workers as the figures show."""
    return [
        Task(
            f"{name} at density {density:g}",
            "tradeoffs",
            partial(_trial, path, name, reducer, settings.figure_world_size),
        )
        for density in settings.densities
        for name, reducer in build_methods(settings.methods, density).items()
    ]


def _matches(settings: ComparisonSettings, path: Path) -> list[Task]:
    """Return searches for the density at which each method sends as much as the reference at the target density."""
    reference = settings.equal_bytes
    if reference is None:
        return []
    return [
        Task(f"{name} with the bytes of {reference}", "matches", partial(_match, path, name, settings))
        for name in settings.methods
    ]


def _match(path: Path, method: str, settings: ComparisonSettings) -> list[Row]:
    """Return the row of a method's density of equal bytes; none where its bytes do not follow the density."""
    gradients, world_size = _read_file(path), settings.figure_world_size
    wanted = _bytes_share(path, str(settings.equal_bytes), settings.density, world_size)
    return [asdict(match) for match in match_bytes([method], wanted, settings.density, gradients, world_size)]


@lru_cache(maxsize=1)
def _bytes_share(path: Path, method: str, density: float, world_size: int) -> float:
    (reducer,) = build_methods([method], density).values()
    return float(trial(method, reducer, _read_file(path), world_size=world_size)[0]["bytes_share"])


def _selection_times(settings: ComparisonSettings, methods: Methods, numel: int) -> list[Task]:
    of = settings.density, settings.repeats
    references = Task(f"references of selection, d = {numel:,}", "times", partial(_reference_times, numel, *of))
    return [references] + [
        Task(f"selection of {name}, d = {numel:,}", "times", partial(_time_selection, name, reducer, numel, *of))
        for name, reducer in methods.items()
    ]


_gradient = lru_cache(maxsize=1)(timing_gradient)


def _reference_times(numel: int, density: float, repeats: int) -> list[Row]:
    found = reference_times(_gradient(numel, density), density, repeats)
    return [{"method": name, "numel": numel} | times for name, times in found.items()]


def _time_selection(method: str, reducer: micro.Reducer, numel: int, density: float, repeats: int) -> list[Row]:
    times = time_selection(reducer, _gradient(numel, density), repeats)
    return [{"method": method, "numel": numel} | times]
