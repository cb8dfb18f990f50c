"""A row per form of a study of language models: what it reached, what it sent, and how many seeds are finished."""

import hashlib
from collections.abc import Iterator, Sequence

import pandas as pd

from experiments.config.errors import UserError
from experiments.reports.link_times import RATES, exchange_s
from experiments.reports.rounds_in_words import interval, outer
from experiments.reports.tokens.forms import Form, Plan, forms_of
from experiments.reports.tokens.points import MEASURES

EQUAL = ["world_size", "passes"]  # what dense training has in common with a form that is set beside it


def with_finished(points: pd.DataFrame, forms: Sequence[Form]) -> Iterator[tuple[Form, list[str]]]:
    """Yield each form of which a run is finished, with the names of those."""
    known = set(points["run"])
    for form in forms:
        if finished := [run for run in form.runs if run in known]:
            yield form, finished


def ends_of(points: pd.DataFrame) -> pd.DataFrame:
    """Return the last evaluation of each run, by its name."""
    return points.sort_values("step").groupby("run").tail(1).set_index("run")


def compute_s_of(points: pd.DataFrame, plan: Plan) -> dict[int, float]:
    """Return the seconds that one worker computes for a batch, by its size: the least of the runs' medians over steps.

    A run beside which others went on took longer for the same.
    """
    seconds = ends_of(points)["compute_s"]
    sizes = pd.Series({run: int(str(plan[run]["batch_size"])) for run in seconds.index})
    return {int(str(size)): float(least) for size, least in seconds.groupby(sizes).min().items()}


def rows(points: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """Return a row per form of which a run is finished, those with the fewest bits per byte first.

    Columns: method, exchanged, name, outer, density (asked for), rate, passes, world_size, batch_size, interval,
    num_seeds and num_planned; for each of MEASURES its mean, and with ``_half_range``, ``_low`` and ``_high`` its
    spread over seeds; to_dense, bits per byte more than the best dense training with an exchange of gradients at every
    step, as many workers and as many passes, NaN without such; measured_density, a mean over exchanges; batch_bytes,
    what rank 0 sends for each batch of a worker; total_bytes; the seconds of the whole run on links, by the keys of
    RATES; manifests, a digest.

    Args:
        points: of ``points``.

    Raises:
        UserError: none of the study's runs is finished.
    """
    if points.empty:
        raise UserError(f"none of the {len(plan)} runs of this study is finished in these folders")
    ends, compute_s = ends_of(points), compute_s_of(points, plan)
    found = [
        _named(form, runs) | _scores(ends.loc[runs]) | _traffic(form, ends.loc[runs], compute_s[form.batch_size])
        for form, runs in with_finished(points, forms_of(plan))
    ]
    return _beside_dense(pd.DataFrame(found)).sort_values("bits_per_byte", ignore_index=True)


def _named(form: Form, runs: Sequence[str]) -> dict[str, object]:
    return {
        "method": form.method,
        "exchanged": form.exchanged,
        "name": form.name,
        "outer": outer(form.config),
        "density": form.density,
        "rate": form.rate,
        "passes": form.passes,
        "world_size": form.world_size,
        "batch_size": form.batch_size,
        "interval": interval(form.config),
        "num_seeds": len(runs),
        "num_planned": len(form.runs),
    }


def _scores(ends: pd.DataFrame) -> dict[str, float]:
    scores: dict[str, float] = {}
    for measure in MEASURES:
        values = ends[measure].astype(float)
        scores |= {measure: values.mean(), f"{measure}_half_range": (values.max() - values.min()) / 2}
        scores |= {f"{measure}_low": values.min(), f"{measure}_high": values.max()}
    return scores


def _traffic(form: Form, ends: pd.DataFrame, compute_s: float) -> dict[str, object]:
    return {
        "measured_density": ends["density"].mean(),
        "batch_bytes": (ends["bytes_sent"] / (ends["step"] * form.batches)).mean(),
        "total_bytes": ends["bytes_sent"].mean(),
        **{rate: seconds_on_link(form, ends, compute_s, rate).mean() for rate in RATES},
        "manifests": _digest(ends["manifest"].sort_index()),
    }


def seconds_on_link(form: Form, points: pd.DataFrame, compute_s: float, rate: str) -> pd.Series:
    """Return the seconds until each evaluation: what was computed, and what was sent over a link, one by one."""
    return exchange_s(points, form.world_size, RATES[rate]) + form.batches * points["step"] * compute_s


def _digest(manifests: pd.Series) -> str:
    digests = "".join(manifests)
    return hashlib.sha256(digests.encode()).hexdigest()[:8] if digests else ""


def _beside_dense(found: pd.DataFrame) -> pd.DataFrame:
    plain = found[(found["method"] == "dense") & (found["exchanged"] == "gradients")]
    best = plain.groupby(EQUAL)["bits_per_byte"].min().rename("best")
    return found.assign(to_dense=found["bits_per_byte"] - found.join(best, on=EQUAL)["best"])
