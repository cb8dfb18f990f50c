"""Finished runs of published studies, from run folders, as rows of the table of runs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError
from experiments.config.keys import Flat
from experiments.config.method_names import PARTS
from experiments.reports.changes import Config, changes, in_words
from experiments.reports.frames import load
from experiments.reports.pages import Page
from experiments.reports.rounds_in_words import exchanged, inner, outer
from experiments.reports.run_configs import planned
from experiments.reports.table import rows_of

Plan = Mapping[str, Flat]
IN_COLUMNS = ("lr", "density", "epochs", "cluster.world_size", *PARTS)


def finished_rows(roots: Sequence[Path], pages: Iterable[Page], plans: Mapping[str, Plan]) -> pd.DataFrame:
    """Return a row per finished run under some folders that belongs to a study of some pages.

    Args:
        plans: the runs of each study by name, with their flat configurations.

    Raises:
        UserError: there is none.
    """
    frames, parts = load(roots), []
    for page in pages:
        for study, plan in ((study, plan) for study, plan in plans.items() if page.has(study)):
            names = [run for run in frames.runs["run"] if run in plan]
            if names:
                forms = _forms({run: frames.settings[run] for run in names}, plan, page)
                parts.append(rows_of(frames, forms, study=study, metric=page.metric))
    if not parts:
        raise UserError(f"{' and '.join(map(str, roots))}: no finished run is one of a study of these pages")
    rows = pd.concat(parts, ignore_index=True)
    studies = rows.groupby("run")["studies"].agg(lambda own: " ".join(dict.fromkeys(own)))
    return rows.drop_duplicates("run").assign(studies=lambda each: each["run"].map(studies))


def _forms(configs: dict[str, Config], plan: Plan, page: Page) -> dict[str, str]:
    """Return what tells each run from the others of its study: what is exchanged, or the settings it changes."""
    if page.metric == "bits_per_byte":
        words = {run: (exchanged(config), outer(config), inner(config)) for run, config in configs.items()}
        return {run: ", ".join(filter(None, parts)) for run, parts in words.items()}
    changed = changes(configs, planned(plan))
    return {run: in_words(changed[run], without=IN_COLUMNS) for run in configs}
