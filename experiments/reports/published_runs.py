"""Finished runs of published studies, from run folders, as rows of the table of runs.

A form is named by how it differs from the usual settings of its study, as KEY=VALUE.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.config.errors import UserError
from experiments.config.identity import identity
from experiments.config.keys import Flat
from experiments.config.method_names import PARTS
from experiments.reports.frames import load
from experiments.reports.pages import Page
from experiments.reports.rounds_in_words import exchanged, inner, outer
from experiments.reports.run_configs import planned
from experiments.reports.table import rows_of

Config = Mapping[str, object]
Plan = Mapping[str, Flat]
OF_METHOD = "sparsifier."
NOT_COMPARED = frozenset({"seed", "sparsifier.name"})
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
    return {
        run: ", ".join(f"{key}={value}" for key, value in changed.items() if key not in IN_COLUMNS)
        for run, changed in changes(configs, planned(plan)).items()
    }


def changes(configs: Mapping[str, Config], plan: Iterable[Config] = ()) -> dict[str, dict[str, str]]:
    """Return, by run, the settings that are not the usual ones, with their values in words.

    Usual is what most forms have; of a method's own parts, what most forms of that method have. Forms are what is left
    when seeds are put together. A key reads as on the command line, without ``sparsifier.`` and ``.name``.

    Args:
        plan: configurations of the whole study: its forms say what is usual, and of those at hand only the methods that
            it has not. So a form has the same name however few are at hand.
    """
    settings = {run: _settings(config) for run, config in configs.items()}
    planned = [_settings(config) for config in plan]
    methods = {found["sparsifier.name"] for found in planned}
    others = [found for found in settings.values() if found["sparsifier.name"] not in methods]
    forms = list({json.dumps(found, sort_keys=True): found for found in [*planned, *others]}.values())
    return {
        run: _unusual(found, _usual(list(settings.values()), found) | _usual(forms, found))
        for run, found in settings.items()
    }


def _settings(config: Config) -> dict[str, str]:
    found = {key: str(value) for key, value in identity(config).items() if key != "seed"}
    if found.get("sparsifier.name") == "dense":
        found.pop("density", None)  # it has none
    return found


def _usual(forms: list[dict[str, str]], of: Mapping[str, str]) -> dict[str, str | None]:
    """Return the usual value of each key for forms of the method of ``of``, None for a key that most have not."""
    same = [form for form in forms if form["sparsifier.name"] == of["sparsifier.name"]]
    keys = dict.fromkeys(key for form in forms for key in form)
    counted = {key: Counter(form.get(key) for form in (same if key.startswith(OF_METHOD) else forms)) for key in keys}
    return {key: counts.most_common(1)[0][0] for key, counts in counted.items()}


def _unusual(found: Mapping[str, str], usual: Mapping[str, str | None]) -> dict[str, str]:
    keys = (key for key in found if key not in NOT_COMPARED and found[key] != usual[key])
    named = {key.removeprefix(OF_METHOD).removesuffix(".name"): found[key] for key in keys}
    return dict(sorted(named.items()))
