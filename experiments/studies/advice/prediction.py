"""The predicted time of each method to dense's accuracy: its epochs there times its predicted step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.config.errors import UserError, one_line
from experiments.studies.advice.evidence import Evidence
from experiments.studies.simulated_steps.method_choices import DENSE, methods_of
from experiments.studies.simulated_steps.steps import crossing, simulate_step
from micro.planning import costs
from micro.planning.costs import Link
from micro.planning.traces import Trace

RATES = (1e7, 1e12)  # bits per second among which a border is looked for
COLUMNS = ["method", "variant", "density", "num_seeds", "epochs", "step_s", "time", "border", "why"]


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


class Course(NamedTuple):
    """A method at one density: its row of the evidence, and the predicted seconds of its step at a rate."""

    row: pd.Series
    step_s: Callable[[float], float]

    def time(self, rate: float) -> float:
        """Return the seconds to the level, in units of the steps of an epoch."""
        return float(self.row["epochs_there"]) * self.step_s(rate)


def predict(evidence: Evidence, setting: Setting) -> pd.DataFrame:
    """Return a row per method: the fastest of the densities at which it came to the level, dense first.

    Columns: method, variant, density, num_seeds (of the evidence), epochs, step_s, time (to the level, of dense's),
    border (bits per second below which it takes less time than dense, at the density that is best there; 0 never,
    infinite always), why (no prediction: the reason, else empty).
    """
    rows, dense = [], _dense(evidence, setting)
    for own, courses, why in _courses(evidence, setting):
        if why:
            rows.append({**own.iloc[0][COLUMNS[:3]], "why": why})
            continue
        best = min(courses, key=lambda course: course.time(setting.rate))
        time = best.time(setting.rate) / dense.time(setting.rate)
        row = {
            **best.row,
            "epochs": best.row["epochs_there"],
            "step_s": best.step_s(setting.rate),
            "time": time,
            "why": "",
        }
        if best.row["method"] != DENSE:
            row["border"] = crossing(lambda rate, own=courses: 1 / _of_dense(own, dense, rate), *RATES, halvings=8)  # type: ignore[misc]
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def over_rates(evidence: Evidence, setting: Setting, rates: Sequence[float]) -> pd.DataFrame:
    """Return the time to the level, of dense's, of each method at its best density: method, variant, rate, time."""
    dense = _dense(evidence, setting)
    rows = [
        {"method": own["method"].iloc[0], "variant": own["variant"].iloc[0], "rate": rate}
        | {"time": _of_dense(courses, dense, rate)}
        for own, courses, _ in _courses(evidence, setting)
        for rate in rates
        if courses and own["method"].iloc[0] != DENSE
    ]
    return pd.DataFrame(rows)


def step_of(method: str, density: float, setting: Setting) -> Callable[[float], float]:
    """Return the predicted seconds of a step over the rate of the link, in bits per second.

    Dense is in DDP's buckets, a sparse method in one: what a training does unless set otherwise.

    Raises:
        UserError: no formula for a method, or a trace without the shapes that it needs.
    """
    methods, _ = methods_of([method], float(density), table=setting.select, memory_gb_s=setting.memory_gb_s)
    schedule = "ddp" if method == DENSE else "single"

    def seconds(rate: float) -> float:
        network = costs.Flat(Link(setting.latency_s, 8 / rate), setting.world_size)
        problem = methods.problem(setting.trace, network, method, setting.world_size)
        return float(simulate_step(problem, schedule, setting.world_size)["step_s"])

    try:
        seconds(setting.rate)
    except ValueError as error:
        raise UserError(f"{one_line(error)}; 'python -m experiments.profile backward' writes shapes") from None
    return seconds


def _dense(evidence: Evidence, setting: Setting) -> Course:
    row = evidence.runs.iloc[0]
    if pd.isna(row["epochs_there"]):
        raise UserError(f"not all dense runs came to {evidence.level} % of their own mean end: choose a lower level")
    return Course(row, step_of(DENSE, row["density"], setting))


def _courses(evidence: Evidence, setting: Setting) -> Iterator[tuple[pd.DataFrame, list[Course], str]]:
    """Yield each method's rows, its courses to the level, and where there are none, why."""
    for (method, _), own in evidence.runs.groupby(["method", "variant"], sort=False):
        tried = "; ".join(
            f"at {row['density']:g} {row['num_there']} of {row['num_seeds']} seeds came there, the end is {row['gap']}"
            for _, row in own.iterrows()
        )
        there = own[own["epochs_there"].notna()]
        try:
            courses = [Course(row, step_of(str(method), row["density"], setting)) for _, row in there.iterrows()]
            yield own, courses, "" if courses else f"no evidence: {tried}"
        except UserError as error:
            yield own, [], f"no prediction: {error}"


def _of_dense(courses: Sequence[Course], dense: Course, rate: float) -> float:
    return min(course.time(rate) for course in courses) / dense.time(rate)
