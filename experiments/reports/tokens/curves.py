"""The loss on the test set of every form of a study against tokens, bytes, and seconds on links."""

import pandas as pd

from experiments.reports.link_times import RATES
from experiments.reports.tokens.forms import Form, Plan, forms_of
from experiments.reports.tokens.rows import compute_s_of, seconds_on_link, with_finished

NUM_DRAWN = 8
KEYS = ["method", "exchanged", "passes", "world_size"]


def curves(points: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """Return a row per form and evaluation, means over those of its finished seeds that have one before the end.

    Columns: KEYS, which name the form, and its name; num_seeds; step; tokens of all workers
    until then; bytes that rank 0 sent until then; seconds until then on links, by the keys of RATES; test_loss.

    Args:
        points: of ``points``.
    """
    compute_s = compute_s_of(points, plan)
    parts = []
    for form, runs in with_finished(points, forms_of(plan)):
        own = points[points["run"].isin(runs)]
        own = own[own.groupby("run")["step"].transform("size") > 1]
        if len(own):
            parts.append(_of_form(form, own, compute_s[form.batch_size]))
    columns = [*KEYS, "name", "num_seeds", "step", "tokens", "bytes", *RATES, "test_loss"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def _of_form(form: Form, own: pd.DataFrame, compute_s: float) -> pd.DataFrame:
    seconds = {rate: seconds_on_link(form, own, compute_s, rate) for rate in RATES}
    found = own.assign(tokens=own["step"] * form.step_tokens, bytes=own["bytes_sent"], **seconds)
    means = found.groupby("step", as_index=False)[["tokens", "bytes", *RATES, "test_loss"]].mean()
    named = means.assign(method=form.method, exchanged=form.exchanged, passes=form.passes, name=form.name)
    return named.assign(world_size=form.world_size, num_seeds=own["run"].nunique())


def drawn(rows: pd.DataFrame, numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that are drawn, NUM_DRAWN at most: dense at every step, MiCRO's best, and the best others.

    Args:
        rows: of ``rows``, the best first.
        numbers: of ``curves``; forms without a curve are left out, and so are longer trainings and more workers.
    """
    known = set(zip(*(numbers[key] for key in KEYS), strict=True))
    has_curve = [key in known for key in zip(*(rows[key] for key in KEYS), strict=True)]
    rows = rows[has_curve]
    rows = rows[(rows["passes"] == rows["passes"].min()) & (rows["world_size"] == rows["world_size"].min())]
    is_first = (rows["method"] == "dense") & (rows["exchanged"] == "gradients")
    is_first |= rows.index.isin(rows.index[rows["method"] == "micro"][:1])
    return pd.concat([rows[is_first], rows[~is_first]])[:NUM_DRAWN]
