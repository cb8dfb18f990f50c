"""Run every method on the same gradients, a trial per core at a time; the failure of one costs the others nothing."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pandas as pd

import micro
from experiments.config.errors import UserError
from experiments.launching.child_environment import num_cores
from experiments.studies.gradient_sources import RECORDED, TITLES, Gradients, check_size
from experiments.studies.method_comparison.equal_bytes import match_bytes
from experiments.studies.method_comparison.kept import KeptResults
from experiments.studies.method_comparison.processes import Call, Failed, Processes
from experiments.studies.method_comparison.settings import ComparisonSettings
from experiments.studies.method_comparison.stream_source import StreamSource
from experiments.studies.method_comparison.trial import Row, trial
from experiments.studies.methods import build_methods
from experiments.studies.recorded_gradients import numel_of, training_config
from experiments.studies.selection_times import TIMES, reference_times, time_selection, timing_gradient
from micro import kernels

WORTH_PROCESSES = 2e9  # elements of gradients over all trials, from where processes of their own gain
Methods = dict[str, micro.Reducer]
ShowProgress = Callable[[str, int], None]  # of the task that begins, and of how many there are


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


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement.

    Attributes:
        name: for the user; no other measurement of the comparison has it.
        call: measures, on the gradients that it is given.
        keep: adds what ``call`` returned to the comparison.
    """

    name: str
    call: Callable[..., Any]
    keep: Callable[[Any], None]


def measure(settings: ComparisonSettings, show_progress: ShowProgress, kept: KeptResults) -> Comparison:
    """Run all methods on all streams and world sizes, and time their selection; Ctrl-C ends it early.

    Args:
        kept: what is among these is not measured again; what is measured is added.
    Raises:
        UserError: gradients that cannot be recorded, or that need more memory than allowed.
    """
    _check(settings)
    done = Comparison()
    kernels.prepare()
    carry_out = partial(_carry_out, partial(_show, show_progress, num_tasks(settings)), kept, done)
    methods = build_methods(settings.methods, settings.density)
    try:
        with Processes(num_processes(settings)) as processes:
            trials = {stream: _trials(settings, methods, stream, done) for stream in settings.streams}
            sources = {stream: StreamSource(stream, settings, processes) for stream in settings.streams}
            after = dict(pairwise(source for stream, source in sources.items() if _left(trials[stream], kept)))
            last = sources[settings.streams[-1]]
            for stream, source in sources.items():
                carry_out(processes, trials[stream], source.gradients, following=after.get(source))
                if source is not last:
                    source.give_up()
            carry_out(processes, _tradeoffs(settings, done), last.gradients)
            carry_out(processes, _matches(settings, last.gradients, done), last.gradients)
        for numel in settings.selection_lengths:  # times are taken with nothing beside them
            gradient = partial(timing_gradient, numel, settings.density)
            for name, times in reference_times(gradient(), settings.density, settings.repeats).items():
                done.times.append({"method": name, "numel": numel} | times)
            carry_out(Processes(1), _selection_times(settings, methods, numel, done), gradient)
    except KeyboardInterrupt:
        done.interrupted = True
    return done


def num_processes(settings: ComparisonSettings) -> int:
    """Return how many processes the trials are worth: one per core, each of which takes seconds to start."""
    sizes = sum(settings.world_sizes) * settings.num_steps * settings.numel * len(settings.methods)
    return num_cores() if sizes * len(settings.streams) > WORTH_PROCESSES else 1


def _show(show_progress: ShowProgress, total: int, task: Task) -> None:
    show_progress(task.name, total)


def _show_one(show: Callable[[Task], None], tasks: Sequence[Task], place: int) -> None:
    """Show the task of this place, unless it is beyond the last."""
    for task in tasks[place : place + 1]:
        show(task)


def _carry_out(
    show: Callable[[Task], None],
    kept: KeptResults,
    done: Comparison,
    processes: Processes,
    tasks: list[Task],
    gradients: Callable[[], Any],
    *,
    following: StreamSource | None = None,
) -> None:
    """Carry out tasks that are left, and take all results in their order, those before an interrupt too.

    Args:
        gradients: what the calls are given, made where one is left.
        following: makes its gradients beside the calls.
    """
    left = _left(tasks, kept)
    for task in tasks:
        if task.name in kept.results:
            show(task)
    failed: dict[str, str] = {}
    try:
        processes.start(len(left))
        given = gradients() if left else None
        calls: list[Call] = [partial(task.call, given) for task in left]
        if left and following and (making := following.making()):
            calls.append(making)
        for place, result in processes.run(calls, lambda place: _show_one(show, left, place)):
            if following and place == len(left):
                following.take(result)
            elif isinstance(result, Failed):
                failed[left[place].name] = result.reason
            else:
                kept.add(left[place].name, result)
    finally:
        for task in tasks:
            if task.name in failed:
                done.failures.append(f"failed: {task.name}: {failed[task.name]}")
            elif task.name in kept.results:
                task.keep(kept.results[task.name])


def _left(tasks: Sequence[Task], kept: KeptResults) -> list[Task]:
    return [task for task in tasks if task.name not in kept.results]


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


def num_tasks(settings: ComparisonSettings) -> int:
    """Return the number of measurements."""
    trials = len(settings.streams) * len(settings.world_sizes) + len(settings.densities) + bool(settings.equal_bytes)
    return (trials + len(settings.selection_lengths)) * len(settings.methods)


def _trials(settings: ComparisonSettings, methods: Methods, stream: str, done: Comparison) -> list[Task]:
    def keep(result: tuple[Row, list[Row]]) -> None:
        done.rows.append(result[0])
        done.steps.extend(result[1])

    return [
        Task(
            f"{name} on {TITLES[stream]} gradients, {world_size} workers",
            partial(trial, name, reducer, world_size=world_size),
            keep,
        )
        for world_size in settings.world_sizes
        for name, reducer in methods.items()
    ]


def _tradeoffs(settings: ComparisonSettings, done: Comparison) -> list[Task]:
    """Return runs of all methods at the further densities, with as many workers as the figures show."""
    return [
        Task(
            f"{name} at density {density:g}",
            partial(trial, name, reducer, world_size=settings.figure_world_size),
            lambda result: done.tradeoffs.append(result[0]),
        )
        for density in settings.densities
        for name, reducer in build_methods(settings.methods, density).items()
    ]


def _matches(settings: ComparisonSettings, gradients: Callable[[], Gradients], done: Comparison) -> list[Task]:
    """Return searches for the density at which each method sends as much as the reference at the target density."""
    reference, world_size = settings.equal_bytes, settings.figure_world_size
    if reference is None:
        return []
    (reducer,) = build_methods([reference], settings.density).values()
    bytes_share = trial(reference, reducer, gradients(), world_size)[0]["bytes_share"]
    return [
        Task(
            f"{name} with the bytes of {reference}",
            partial(_matching_rows, name, bytes_share, settings.density, world_size=world_size),
            done.matches.extend,
        )
        for name in settings.methods
    ]


def _matching_rows(
    method: str, bytes_share: float, density: float, gradients: Gradients, *, world_size: int
) -> list[Row]:
    """Return the row of a method's density of equal bytes; none where its bytes do not follow the density."""
    return [asdict(match) for match in match_bytes([method], bytes_share, density, gradients, world_size)]


def _selection_times(settings: ComparisonSettings, methods: Methods, numel: int, done: Comparison) -> list[Task]:
    def keep(name: str, times: dict[str, float]) -> None:
        done.times.append({"method": name, "numel": numel} | times)

    return [
        Task(
            f"selection of {name}, d = {numel:,}",
            partial(time_selection, reducer, repeats=settings.repeats),
            partial(keep, name),
        )
        for name, reducer in methods.items()
    ]
