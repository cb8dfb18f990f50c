"""The predicted time of each method to dense's accuracy: its epochs there times its predicted step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.config.errors import UserError, one_line
from experiments.studies.advice.evidence import Evidence
from experiments.studies.simulated_steps.method_choices import DENSE, methods_of
from experiments.studies.simulated_steps.steps import crossing, simulate_step
from micro.planning.costs import Flat, Link
from micro.planning.traces import Trace

RATES = (1e7, 1e12)  # bits per second among which a border is looked for
KEYS = ["method", "variant", "density"]
COLUMNS = [*KEYS, "num_seeds", "epochs", "step_s", "time", "border", "why"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a prediction is for, beside the rate of the link.

    ``latency_s`` is of a message; without a table of ``select`` a formula counts, with memory of that bandwidth.
    """

    trace: Trace
    world_size: int
    latency_s: float
    select: Path | None
    memory_gb_s: float


class Form(NamedTuple):
    """A method in one form: each density at which it came to the level, or why nothing can be said.

    ``courses`` are rows of the evidence, each with the predicted seconds of its step at a rate.
    """

    first: pd.Series
    courses: Sequence[tuple[pd.Series, Callable[[float], float]]]
    why: str = ""

    def best(self, rate: float) -> tuple[float, pd.Series, float]:
        """Return the least time to the level, in units of the steps of an epoch, its row, and the seconds of a step."""
        steps = ((row, step_s(rate)) for row, step_s in self.courses)
        times = [(float(row["epochs_there"]) * seconds, row, seconds) for row, seconds in steps]
        return min(times, key=lambda each: each[0])


def forms_of(evidence: Evidence, setting: Setting) -> list[Form]:
    """Return each method's form, dense first. Raises: UserError: not all dense runs came to the level."""
    if pd.isna(evidence.runs.iloc[0]["epochs_there"]):
        raise UserError(f"not all dense runs came to {evidence.level} % of their own mean end: choose a lower level")
    return [_form(rows, setting) for _, rows in evidence.runs.groupby(["method", "variant"], sort=False)]


def _form(rows: pd.DataFrame, setting: Setting) -> Form:
    first, there = rows.iloc[0], rows[rows["epochs_there"].notna()]
    try:
        courses = [(row, step_of(str(row["method"]), row["density"], setting)) for _, row in there.iterrows()]
    except UserError as error:
        return Form(first, [], f"no prediction: {error}")
    tried = "; ".join(
        f"at {row['density']:g} {row['num_there']} of {row['num_seeds']} seeds came there, the end is {row['gap']}"
        for _, row in rows.iterrows()
    )
    return Form(first, courses, "" if courses else f"no evidence: {tried}")


def predict(forms: Sequence[Form], rate: float) -> pd.DataFrame:
    """Return a row per method: the fastest of the densities at which it came to the level, dense first.

    Columns: method, variant, density, num_seeds (of the evidence), epochs, step_s, time (to the level, of dense's),
    border (bits per second below which it takes less time than dense, at the density that is best there; 0 never,
    infinite always), why (no prediction: the reason, else empty).
    """
    rows, dense = [], forms[0]
    for form in forms:
        if form.why:
            rows.append({**form.first[KEYS], "why": form.why})
            continue
        time, row, step_s = form.best(rate)
        numbers = {"step_s": step_s, "time": time / dense.best(rate)[0], "why": ""}
        rows.append({**row, "epochs": row["epochs_there"], **numbers})
        if form is not dense:
            gain = lambda at, form=form: dense.best(at)[0] / form.best(at)[0]  # noqa: E731
            rows[-1]["border"] = crossing(gain, *RATES, halvings=8)
    return pd.DataFrame(rows, columns=COLUMNS)


def over_rates(forms: Sequence[Form], rates: Sequence[float]) -> pd.DataFrame:
    """Return the time to the level, of dense's, of each method at its best density: method, variant, rate, time."""
    dense, *others = forms
    rows = [
        {**form.first[KEYS[:2]], "rate": rate, "time": form.best(rate)[0] / dense.best(rate)[0]}
        for form in others
        if form.courses
        for rate in rates
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
        network = Flat(Link(setting.latency_s, 8 / rate), setting.world_size)
        problem = methods.problem(setting.trace, network, method)
        return float(simulate_step(problem, schedule, setting.world_size)["step_s"])

    try:
        seconds(RATES[0])
    except ValueError as error:
        raise UserError(f"{one_line(error)}; 'python -m experiments.profile backward' writes shapes") from None
    return seconds
