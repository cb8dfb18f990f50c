"""A study: the runs of its grid, from a file of conf/sweep or from the user's own file."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from experiments.config.compose import compose_runs
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError, suggestion
from experiments.config.identity import run_name
from experiments.config.paths import CONF
from experiments.config.ranges import check_num_runs, check_path
from experiments.config.values import Flat, flat
from experiments.runs.output import distinct


def studies() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))


def jobs_of(name: str, overrides: list[str]) -> list[list[str]]:
    """Return one list of words per run of a study: the product of its grid.

    A value of the grid may be a list of words: all of them are then set together, and the key is only a label. So two
    settings can change together.

    Args:
        name: name of a file of conf/sweep, or path of a yaml file.
        overrides: words for every run, added after the study's own.

    Raises:
        UserError: no such study, or its file has the wrong form.
    """
    path = _path_of(name)
    study = read_yaml(path)
    if set(study) != {"overrides", "grid"}:
        raise UserError(f"{path} must have the keys overrides and grid")
    fixed, grid = study["overrides"] or [], study["grid"] or {}
    if not isinstance(fixed, list) or not isinstance(grid, dict):
        raise UserError(f"{path}: overrides must be a list of words, and grid a mapping of lists")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid.{key} must be a list of values, got {values!r}")
    check_num_runs(str(path), math.prod(map(len, grid.values())))
    choices = [[_words(key, value) for value in values] for key, values in grid.items()]
    return [[*map(str, fixed), *itertools.chain(*job), *overrides] for job in itertools.product(*choices)]


def planned_runs(name: str, device: str = "cpu") -> dict[str, Flat]:
    """Return the runs of a study by their names, with their flat configurations, each once, in its order.

    Args:
        device: of all runs; those of published pages were on CPUs.
    """
    jobs = jobs_of(name, [f"cluster.device={device}"])
    _, configs = distinct(jobs, compose_runs(jobs))
    return {run_name(config): flat(dataclasses.asdict(config)) for config in configs}


def _path_of(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        check_path("the file of a study", name)
        return Path(name)
    if name not in studies():
        raise UserError(f"study must be one of {', '.join(studies())}, got '{name}'{suggestion(name, studies())}")
    return CONF / "sweep" / f"{name}.yaml"


def _words(key: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    return [f"{key}={value if isinstance(value, str) else Override._get_value_element_as_str(value)}"]
