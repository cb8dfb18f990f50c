"""Run every method on the same gradients, one trial per core at a time; failures do not affect other trials."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import micro
from experiments.config.errors import UserError
from experiments.tools.compare.tasks import Ended, Task, carry_out, processes
from experiments.tools.compare.trial import Row, one_thread, trial
from experiments.tools.shared.gradient_sources import RECORDED, TITLES, Gradients, check_size, synthetic
from experiments.tools.shared.methods import build_methods
from experiments.tools.shared.recorded_gradients import numel_of, record, training_config
from experiments.tools.shared.selection_times import TIMES, reference_times, time_selection, timing_gradient
from micro.kernels import preparing

FIGURE_WORLD_SIZE = 16  # number of workers in figures and tables that show only one, if it was measured
WORTH_PROCESSES = 2e9  # several processes are faster from so many elements in all trials


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """The settings of a comparison, and its gradients.

    Attributes:
        streams: of gradients, keys of gradient_sources.TITLES.
        world_sizes: numbers of simulated ranks, ascending.
        densities: more targets, for the error over compression on the last stream.
        numel: length of drawn gradients.
        recorded_training: overrides of the recorded training, as for experiments.train.
        selection_lengths: numbers of elements at which selection is timed.
        repeats: steps behind each median time.
        max_gb: most memory for gradients.
    """

    methods: Sequence[str]
    streams: Sequence[str]
    world_sizes: Sequence[int]
    density: float
    densities: Sequence[float] = ()
    numel: int
    num_steps: int
    seed: int = 0
    recorded_training: Sequence[str] = ()
    selection_lengths: Sequence[int] = ()
    repeats: int
    max_gb: float

    @property
    def figure_world_size(self) -> int:
        """The number of workers for everything measured or shown for a single number."""
        return FIGURE_WORLD_SIZE if FIGURE_WORLD_SIZE in self.world_sizes else max(self.world_sizes)


@dataclass(slots=True)
class Comparison:
    """The results so far.

    Attributes:
        rows: one per method, stream and world size; ``steps``: one per step of these.
        times: of selection, one per method and length.
        tradeoffs: rows like the first, for more densities.
        failures: error messages, one line each.
        interrupted: whether the user stopped it.
    """

    rows: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    times: list[Row] = field(default_factory=list)
    tradeoffs: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def timed(self) -> pd.DataFrame:
        """The times of selection; columns method, numel, TIMES."""
        return pd.DataFrame(self.times, columns=["method", "numel", *TIMES])

    def add(self, kind: str, result: Any) -> None:
        """Add the result of a task to the list ``kind``."""
        if kind in ("rows", "tradeoffs"):
            row, steps = result
            result = [row]
            self.steps += steps if kind == "rows" else []
        getattr(self, kind).extend(result)


def measure(settings: ComparisonSettings, show_progress: Callable[[str, int], None]) -> Comparison:
    """Run all methods on all streams and world sizes, and time their selection; Ctrl-C ends it early.

    Args:
        show_progress: called with the name of each finished task, and the number of tasks.

    Raises:
        UserError: gradients cannot be recorded, or need more memory than allowed.
    """
    _check(settings)
    preparing.prepare()
    methods = build_methods(settings.methods, settings.density)
    done, found = Comparison(), {}
    with tempfile.TemporaryDirectory(prefix="micro-compare-") as folder, processes(num_processes(settings)) as pool:
        files = {stream: Path(folder) / stream for stream in settings.streams}
        trials = {stream: list(_trials(stream, methods, settings, path)) for stream, path in files.items()}
        times = list(_selections(methods, settings))
        every_task = [*(task for tasks in trials.values() for task in tasks), *times]
        try:
            for ended in _carry_out_all(trials, times, settings, files, pool):
                found[ended.task.name] = ended
                show_progress(ended.task.name, len(every_task))
        except KeyboardInterrupt:
            done.interrupted = True
        except BrokenProcessPool:
            done.failures.append("failed: a process was killed, perhaps for want of memory")
    for ended in (found[task.name] for task in every_task if task.name in found):
        if ended.failure:
            done.failures.append(f"failed: {ended.task.name}: {ended.failure}")
        else:
            done.add(ended.task.kind, ended.result)
    return done


def _carry_out_all(
    trials: dict[str, list[Task]],
    times: list[Task],
    settings: ComparisonSettings,
    files: dict[str, Path],
    pool: ProcessPoolExecutor | None,
) -> Iterator[Ended]:
    """Run the trials stream by stream, then the timed selections with nothing else running."""
    for stream, tasks in trials.items():
        _make_file(stream, settings, files[stream])
        yield from carry_out(tasks, pool)
        files[stream].unlink()
    yield from carry_out(times, None)


def num_processes(settings: ComparisonSettings) -> int:
    """Return how many processes to use, at most one per core; each takes seconds to start."""
    sizes = sum(settings.world_sizes) * settings.num_steps * settings.numel * len(settings.methods)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if sizes * len(settings.streams) > WORTH_PROCESSES else 1


def _check(settings: ComparisonSettings) -> None:
    """Check the requirements of all gradients before the first is drawn. Raises: UserError, as measure."""
    world_size, words = max(settings.world_sizes), list(settings.recorded_training)
    lengths = [] if set(settings.streams) == {RECORDED} else [settings.numel]
    if RECORDED in settings.streams:
        lengths.append(numel_of(training_config(words, world_size)))
    elif words:
        raise UserError(f"'{words[0]}' is for the stream recorded: add it to --streams, or leave out the settings")
    for numel in lengths:
        check_size(settings.num_steps, world_size, numel, settings.max_gb)
    longest = max(settings.selection_lengths, default=0)
    if 4e-9 * longest > settings.max_gb:
        raise UserError(
            f"--select-numel {longest} is more than --max-gb {settings.max_gb:g} allows: change one of them"
        )


def _make_file(stream: str, settings: ComparisonSettings, path: Path) -> None:
    """Write the gradients of a stream to a file that all processes memory-map.

    They are drawn or recorded with one thread: another number rounds a training's sums otherwise.
    """
    sizes: dict[str, Any] = {"num_steps": settings.num_steps, "world_size": max(settings.world_sizes)}
    sizes["max_gb"] = settings.max_gb
    with one_thread():
        if stream == RECORDED:
            made = record(list(settings.recorded_training), **sizes)
        else:
            made = synthetic(stream, numel=settings.numel, density=settings.density, seed=settings.seed, **sizes)
    torch.save(made, path)


@lru_cache(maxsize=1)
def _read_file(path: Path) -> Gradients:
    made: Gradients = torch.load(path, mmap=True, weights_only=False)
    return made


def _trials(stream: str, methods: dict[str, micro.Reducer], settings: ComparisonSettings, path: Path) -> Iterator[Task]:
    """Yield the trials on a stream; on the last one also with more densities."""
    for n in settings.world_sizes:
        for name, reducer in methods.items():
            named = f"{name} on {TITLES[stream]} gradients, {n} workers"
            yield Task(named, "rows", partial(_trial, path, name, reducer, n))
    if stream != settings.streams[-1]:
        return
    for density in settings.densities:
        for name, reducer in build_methods(settings.methods, density).items():
            at_density = partial(_trial, path, name, reducer, settings.figure_world_size)
            yield Task(f"{name} at density {density:g}", "tradeoffs", at_density)


def _trial(path: Path, method: str, reducer: micro.Reducer, world_size: int) -> tuple[Row, list[Row]]:
    return trial(method, reducer, _read_file(path), world_size=world_size)


_gradient = lru_cache(maxsize=1)(timing_gradient)


def _selections(methods: dict[str, micro.Reducer], settings: ComparisonSettings) -> Iterator[Task]:
    for numel in settings.selection_lengths:
        for name, reducer in {"references": None, **methods}.items():
            of = name, reducer, numel, settings.density, settings.repeats
            yield Task(f"selection of {name}, d = {numel:,}", "times", partial(_time_selection, *of))


def _time_selection(method: str, reducer: micro.Reducer | None, numel: int, density: float, repeats: int) -> list[Row]:
    gradient = _gradient(numel, density)
    found = {method: time_selection(reducer, gradient, repeats)} if reducer else {}
    found = found or reference_times(gradient, density, repeats)
    return [{"method": name, "numel": numel} | times for name, times in found.items()]
