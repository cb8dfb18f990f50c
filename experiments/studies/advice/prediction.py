"""The predicted time of each method to dense's accuracy: its epochs there times its predicted step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError, one_line
from experiments.studies.advice.evidence import Evidence, Reached
from experiments.studies.simulated_steps.borders import crossing
from experiments.studies.simulated_steps.method_choices import DENSE, methods_of
from experiments.studies.simulated_steps.step import simulate_step
from micro.planning import costs
from micro.planning.costs import Link
from micro.planning.traces import Trace

RATES = (1e7, 1e12)  # bits per second among which a border is looked for
SCHEDULES = {DENSE: "ddp"}  # dense in DDP's buckets, a sparse method in one: what a training does unless set otherwise
ONE_BUCKET = "single"

StepOf = Callable[[float], float]  # seconds of a step at a rate in bits per second


@dataclass(frozen=True, slots=True)
class Course:
    """A method at one density: the epochs that it took to the level, and its predicted step."""

    runs: Reached
    epochs: float
    step_s: StepOf

    def time(self, rate: float) -> float:
        """Return epochs times seconds of a step, at a rate in bits per second."""
        return self.epochs * self.step_s(rate)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a prediction is for.

    Attributes:
        latency_s: of a message on the link.
        select: table of `experiments.profile select`; None: a formula.
        memory_gb_s: bandwidth of memory in that formula.
    """

    trace: Trace
    world_size: int
    rate: float
    latency_s: float
    select: Path | None
    memory_gb_s: float


def predict(evidence: Evidence, setting: Setting) -> pd.DataFrame:
    """Return a row per method: the fastest of the densities at which it came to the level, dense first.

    Columns: method, variant, density, num_seeds (of the evidence), epochs, step_s, time (to the level, of dense's),
    border (bits per second below which it takes less time than dense, at the density that is best there; 0 never,
    infinite always), why (no prediction: the reason, else empty).
    """
    dense = _dense(evidence, setting)
    rows = [_row(dense, setting.rate) | {"time": 1.0, "why": ""}]
    for runs in _by_method(evidence):
        courses, why = _courses(runs, setting)
        names = {"method": runs[0].method, "variant": runs[0].variant, "density": runs[0].density}
        rows.append(_best(courses, dense, setting.rate) if courses else names | {"why": why})
    columns = ["method", "variant", "density", "num_seeds", "epochs", "step_s", "time", "border", "why"]
    return pd.DataFrame(rows, columns=columns)


def over_rates(evidence: Evidence, setting: Setting, rates: Sequence[float]) -> pd.DataFrame:
    """Return the time to the level, of dense's, of each method at its best density: method, variant, rate, time."""
    dense, rows = _dense(evidence, setting), []
    for runs in _by_method(evidence):
        courses, _ = _courses(runs, setting)
        names = {"method": runs[0].method, "variant": runs[0].variant}
        rows += [names | {"rate": rate, "time": 1 / _gain(courses, dense, rate)} for rate in rates if courses]
    return pd.DataFrame(rows)


def step_of(runs: Reached, setting: Setting) -> StepOf:
    """Return the predicted seconds of a step over the rate of the link.

    Raises:
        UserError: no formula for a method, or a trace without the shapes that it needs.
    """
    methods, _ = methods_of([runs.method], runs.density, table=setting.select, memory_gb_s=setting.memory_gb_s)
    schedule = SCHEDULES.get(runs.method, ONE_BUCKET)

    def seconds(rate: float) -> float:
        network = costs.Flat(Link(setting.latency_s, 8 / rate), setting.world_size)
        problem = methods.problem(setting.trace, network, runs.method, setting.world_size)
        return float(simulate_step(problem, schedule, setting.world_size)["step_s"])

    try:
        seconds(setting.rate)
    except ValueError as error:
        raise UserError(f"{one_line(error)}; 'python -m experiments.profile backward' writes shapes") from None
    return seconds


def _by_method(evidence: Evidence) -> Iterator[list[Reached]]:
    keys = dict.fromkeys((runs.method, runs.variant) for runs in evidence.methods)
    for key in keys:
        yield [runs for runs in evidence.methods if (runs.method, runs.variant) == key]


def _dense(evidence: Evidence, setting: Setting) -> Course:
    if evidence.dense.epochs is None:
        raise UserError(f"not all dense runs came to {evidence.level} % of their own mean end: choose a lower level")
    return Course(evidence.dense, evidence.dense.epochs, step_of(evidence.dense, setting))


def _courses(runs: Sequence[Reached], setting: Setting) -> tuple[list[Course], str]:
    """Return a method's densities at which all seeds came to the level; where there are none, why."""
    there = [(each, each.epochs) for each in runs if each.epochs is not None]
    if not there:
        tried = "; ".join(
            f"at {each.density:g} {each.num_there} of {each.num_seeds} seeds came there, the end is {each.to_dense}"
            for each in runs
        )
        return [], f"no evidence: {tried}"
    try:
        return [Course(each, epochs, step_of(each, setting)) for each, epochs in there], ""
    except UserError as error:
        return [], f"no prediction: {error}"


def _best(courses: Sequence[Course], dense: Course, rate: float) -> dict[str, object]:
    best = min(courses, key=lambda course: course.time(rate))
    border = crossing(lambda at: _gain(courses, dense, at), *RATES, halvings=8)
    return _row(best, rate) | {"time": best.time(rate) / dense.time(rate), "border": border, "why": ""}


def _gain(courses: Sequence[Course], dense: Course, rate: float) -> float:
    return dense.time(rate) / min(course.time(rate) for course in courses)


def _row(course: Course, rate: float) -> dict[str, object]:
    runs = course.runs
    names = {"method": runs.method, "variant": runs.variant, "density": runs.density, "num_seeds": runs.num_seeds}
    return names | {"epochs": course.epochs, "step_s": course.step_s(rate)}
