"""What each run of a study had reached and sent at every evaluation: all that a page needs, a line per run."""

from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError, one_line
from experiments.reports.frames import Frames
from experiments.reports.provenance import UNKNOWN
from experiments.reports.run_rows import ORIGIN
from experiments.reports.tokens.forms import Form, Plan, forms_of

MEASURES = ("bits_per_byte", "test_loss")
POINT = ("step", *MEASURES, "density", "bytes_sent", "num_collectives")  # of an evaluation, in the order of a CSV
OF_RUN = ("run", "compute_s", "manifest", *ORIGIN)
TEXTS = ("run", "manifest", "curve", *ORIGIN)


def points(frames: Frames, plan: Plan) -> pd.DataFrame:
    """Return a row per evaluation of each finished run of a study, by run and step.

    Columns: those of OF_RUN: run, compute_s (seconds that one worker computes for one batch, the median over steps),
    manifest (a digest) and the run's origin; and those of POINT: step (how many were done), MEASURES, and until then
    the mean density of exchanges, the bytes that rank 0 sent, and its collectives.

    Raises:
        UserError: a run measures no bits per byte.
    """
    if missing := [measure for measure in MEASURES if measure not in frames.epochs]:
        raise UserError(f"the runs have no {' and no '.join(missing)}: this page is for language models of bytes")
    steps = {str(run): own for run, own in frames.steps.groupby("run")}
    ends = {str(run): own for run, own in frames.epochs.groupby("run")}
    parts = [
        _evaluations(steps[run], ends[run]).assign(**_facts(frames, form, run, steps[run]))
        for form in forms_of(plan)
        for run in form.runs
        if run in steps
    ]
    return pd.concat(parts, ignore_index=True)[[*OF_RUN, *POINT]] if parts else pd.DataFrame(columns=[*OF_RUN, *POINT])


def _evaluations(steps: pd.DataFrame, ends: pd.DataFrame) -> pd.DataFrame:
    """Return the evaluations of a run, those within its epochs too: a row of POINT each."""
    applied = steps["density"].where(~steps["skipped"])
    until = pd.DataFrame(
        {
            "step": steps["step"] + 1,
            "density": applied.expanding().mean(),
            "bytes_sent": steps["bytes_sent"].cumsum(),
            "num_collectives": pd.to_numeric(steps["num_collectives"]).fillna(0).cumsum(),
        }
    )
    within = steps.reindex(columns=["step", *MEASURES]).dropna(subset=list(MEASURES))
    within = within.assign(step=within["step"] + 1)
    found = pd.concat([part for part in (ends[["step", *MEASURES]], within) if not part.empty])
    return found.drop_duplicates("step").merge(until, on="step").sort_values("step")


def _facts(frames: Frames, form: Form, run: str, steps: pd.DataFrame) -> dict[str, str | float]:
    """Return OF_RUN, which all rows of a run have. Simulated workers compute in turn, so that each took its share."""
    origin = frames.origins.get(run, {})
    return {
        "run": run,
        "compute_s": steps["compute_s"].median() / (form.batches * (form.world_size if form.is_simulated else 1)),
        "manifest": frames.manifests.get(run, ""),
        **{column: origin.get(key, UNKNOWN) for column, key in ORIGIN.items()},
    }


def joined(earlier: pd.DataFrame, own: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """Return points of runs at hand, and earlier ones of runs of the study that are not."""
    known = earlier[earlier["run"].isin(plan) & ~earlier["run"].isin(own["run"])]
    return pd.concat([part for part in (own, known) if not part.empty] or [own], ignore_index=True)


def lines(found: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run of ``points``: OF_RUN and its curve, the numbers of POINT with semicolons between them."""
    rows = []
    for run, own in found.groupby("run"):
        curve = ";".join(" ".join(f"{value:.10g}" for value in point) for point in own[list(POINT)].to_numpy(float))
        rows.append({**own.iloc[0][list(OF_RUN)], "run": run, "curve": curve})
    return pd.DataFrame(rows, columns=[*OF_RUN, "curve"])


def read(path: Path) -> pd.DataFrame:
    """Read ``points`` from a CSV of ``lines``. Raises: UserError where it is none."""
    try:
        rows = pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str), keep_default_na=False)
        curves = rows.assign(point=rows["curve"].str.split(";")).explode("point", ignore_index=True)
        numbers = curves["point"].str.split(" ", expand=True).astype(float).set_axis(list(POINT), axis=1)
        return pd.concat([curves[list(OF_RUN)], numbers], axis=1).astype({"step": int})
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, ValueError, pd.errors.ParserError) as error:
        raise UserError(
            f"{path} is no table of a study's runs: {one_line(error)}; give a *_runs.csv of its page"
        ) from None
