"""Run every method on the same gradients, one trial after the other; the failure of one costs the others nothing."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial

import micro
from experiments.config.errors import UserError
from experiments.studies.gradient_sources import RECORDED, TITLES, Gradients, check_size, synthetic
from experiments.studies.method_comparison.equal_bytes import match_bytes
from experiments.studies.method_comparison.settings import ComparisonSettings
from experiments.studies.method_comparison.trial import Row, trial
from experiments.studies.methods import build_methods
from experiments.studies.recorded_gradients import numel_of, record, training_config
from experiments.studies.selection_times import reference_times, time_selection, timing_gradient
from micro import kernels

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


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: its name, and what adds its result to the comparison."""

    name: str
    run: Callable[[], None]


def measure(settings: ComparisonSettings, show_progress: ShowProgress) -> Comparison:
    """Run all methods on all streams and world sizes, and time their selection; Ctrl-C ends it early.

    Raises:
        UserError: gradients that cannot be recorded, or that need more memory than allowed.
    """
    _check(settings)
    done = Comparison()
    kernels.prepare()
    total = num_tasks(settings)
    try:
        for task in _tasks(settings, build_methods(settings.methods, settings.density), done):
            show_progress(task.name, total)
            try:
                task.run()
            except Exception as error:
                done.failures.append(f"failed: {task.name}: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        done.interrupted = True
    return done


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


def _tasks(settings: ComparisonSettings, methods: Methods, done: Comparison) -> Iterator[Task]:
    for stream in settings.streams:
        gradients = _gradients(stream, settings)
        for world_size in settings.world_sizes:
            yield from _trials(methods, gradients, world_size, done)
    yield from _tradeoffs(settings, gradients, done)
    if settings.equal_bytes:
        yield from _matches(settings, settings.equal_bytes, gradients, done)
    for numel in settings.selection_lengths:
        yield from _selection_times(settings, methods, numel, done)


def _gradients(stream: str, settings: ComparisonSettings) -> Gradients:
    world_size = max(settings.world_sizes)
    if stream == RECORDED:
        overrides = list(settings.recorded_training)
        return record(overrides, num_steps=settings.num_steps, world_size=world_size, max_gb=settings.max_gb)
    return synthetic(
        stream,
        numel=settings.numel,
        num_steps=settings.num_steps,
        world_size=world_size,
        density=settings.density,
        seed=settings.seed,
        max_gb=settings.max_gb,
    )


def _trials(methods: Methods, gradients: Gradients, world_size: int, done: Comparison) -> Iterator[Task]:
    def run(name: str, reducer: micro.Reducer) -> None:
        row, steps = trial(name, reducer, gradients, world_size)
        done.rows.append(row)
        done.steps += steps

    for name, reducer in methods.items():
        title = f"{name} on {TITLES[gradients.stream]} gradients, {world_size} workers"
        yield Task(title, partial(run, name, reducer))


def _tradeoffs(settings: ComparisonSettings, gradients: Gradients, done: Comparison) -> Iterator[Task]:
    """Run all methods at the further densities, with as many workers as the figures show."""

    def run(name: str, reducer: micro.Reducer) -> None:
        done.tradeoffs.append(trial(name, reducer, gradients, settings.figure_world_size)[0])

    for density in settings.densities:
        for name, reducer in build_methods(settings.methods, density).items():
            yield Task(f"{name} at density {density:g}", partial(run, name, reducer))


def _matches(settings: ComparisonSettings, reference: str, gradients: Gradients, done: Comparison) -> Iterator[Task]:
    """Find for each method the density at which it sends as much as the reference at the target density."""
    world_size = settings.figure_world_size
    (reducer,) = build_methods([reference], settings.density).values()
    bytes_share = trial(reference, reducer, gradients, world_size)[0]["bytes_share"]

    def run(name: str) -> None:
        found = match_bytes([name], bytes_share, settings.density, gradients, world_size)
        done.matches += [asdict(match) for match in found]

    for name in settings.methods:
        yield Task(f"{name} with the bytes of {reference}", partial(run, name))


def _selection_times(settings: ComparisonSettings, methods: Methods, numel: int, done: Comparison) -> Iterator[Task]:
    gradient = timing_gradient(numel, settings.density)
    for name, seconds in reference_times(gradient, settings.density).items():
        done.times.append({"method": name, "numel": numel, "select_s": seconds})

    def run(name: str, reducer: micro.Reducer) -> None:
        seconds = time_selection(reducer, gradient, settings.repeats)
        done.times.append({"method": name, "numel": numel, "select_s": seconds})

    for name, reducer in methods.items():
        yield Task(f"selection of {name}, d = {numel:,}", partial(run, name, reducer))
