"""Read a study, the runs of its grids, from conf/sweep or a user's file.

A file has one grid, or several under ``parts``: NAME means all of them, NAME/PART one. ``scales`` has variants of a
study for smaller and larger machines, one of which must be chosen.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override

from experiments.config import CONF
from experiments.config.compose import compose_runs
from experiments.config.conf_files import check_name, read_yaml
from experiments.config.errors import UserError, check_choice
from experiments.config.identity import run_name
from experiments.config.keys import Flat, flat
from experiments.config.ranges import PATH, check_num_runs
from experiments.config.schema import TrainConfig
from experiments.runs.before_start import distinct

SEVERAL = ("parts", "scales")  # keys under which a file has several grids
MOST_NAMED = 3  # runs that a line names
Jobs = list[list[str]]  # the words of each run


def studies() -> list[str]:
    """Return the names of all studies, which are files."""
    return sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))


def parts_of(name: str) -> list[str]:
    """Return NAME/PART for each part or scale of a file of conf/sweep; its name where it has none."""
    study = read_yaml(_path_of(name))
    return [f"{name}/{part}" for key in SEVERAL for part in study.get(key, ())] or [name]


def jobs_of(name: str, overrides: list[str]) -> Jobs:
    """Return the words of each run of a study, with ``overrides`` after its own; a run of several parts comes again.

    Args:
        name: NAME or NAME/PART of conf/sweep, or path of a yaml file.
        overrides: words for every run.
    """
    return [[*job, *overrides] for grid in _grids(name) for job in grid]


class Runs(NamedTuple):
    """The runs of a study, each once.

    Attributes:
        jobs: the words of each.
        configs: their configurations.
        merged: which combinations of words are one run, and why, in one line; empty where none are.
    """

    jobs: Jobs
    configs: list[TrainConfig]
    merged: str


def runs_of(name: str, overrides: list[str]) -> Runs:
    """Return the runs of a study. Raises: UserError."""
    runs: dict[str, tuple[list[str], TrainConfig]] = {}
    counts: Counter[str] = Counter()
    for grid in _grids(name):
        jobs = [[*job, *overrides] for job in grid]
        configs = compose_runs(jobs)
        counts.update(map(run_name, configs))
        for words, config in zip(*distinct(jobs, configs), strict=True):
            runs.setdefault(run_name(config), (words, config))
    jobs, configs = [words for words, _ in runs.values()], [config for _, config in runs.values()]
    return Runs(jobs, configs, _merged(counts, {run: config for run, (_, config) in runs.items()}))


def _merged(counts: Counter[str], configs: Mapping[str, TrainConfig]) -> str:
    """Return which combinations of words are one run, and why: it sends everything, or stands in several parts."""
    several = {run: number for run, number in counts.items() if number > 1}
    if not several:
        return ""
    why = [
        f"{run} stands for {number} "
        + ("(sends everything)" if configs[run].sparsifier.sends_everything else "(in several parts)")
        for run, number in several.items()
    ]
    more = f" and {len(why) - MOST_NAMED} more" if len(why) > MOST_NAMED else ""
    return f"{counts.total()} combinations are {len(counts)} runs: {', '.join(why[:MOST_NAMED])}{more}"


def planned_runs(name: str, device: str = "cpu") -> dict[str, Flat]:
    """Return the runs of a study on a device by their names, with their flat configurations, each once, in order."""
    configs = runs_of(name, [f"cluster.device={device}"]).configs
    return {run_name(config): flat(dataclasses.asdict(config)) for config in configs}


def _grids(name: str) -> list[Jobs]:
    """Return the jobs of each grid that a name means. Raises: UserError: as jobs_of."""
    file, part = (name, "") if _is_path(name) else name.partition("/")[::2]
    path = _path_of(file)
    study = read_yaml(path)
    kind = next((key for key in SEVERAL if key in study), "")
    grids, common = (study[kind], study.get("overrides", [])) if kind else ({"": study}, [])
    if kind and not (isinstance(grids, dict) and grids and set(study) <= {"overrides", kind}):
        raise UserError(f"{path} must have a mapping of {' or '.join(SEVERAL)}, and overrides for all of them")
    if kind == "scales" and not part:
        raise UserError(f"study {file} has several scales; name one: {', '.join(f'{file}/{each}' for each in grids)}")
    if part:
        check_choice(f"part of {file}", list(grids) if kind else [], part)
    chosen = [
        _checked(f"{path}: {each}".removesuffix(": "), grids[each], common) for each in ([part] if part else grids)
    ]
    check_num_runs(name, sum(math.prod(map(len, values.values())) for _, values in chosen))
    return [_jobs(words, values) for words, values in chosen]


def _checked(where: str, grid: Any, common: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return the words of all runs of a grid, and the values of each key. Raises: UserError: its form is wrong."""
    if not isinstance(grid, dict) or "grid" not in grid or not set(grid) <= {"overrides", "grid"}:
        raise UserError(f"{where} must have the keys overrides and grid")
    words, values = grid.get("overrides") or [], grid["grid"] or {}
    if not isinstance(words, list) or not isinstance(common, list) or not isinstance(values, dict):
        raise UserError(f"{where}: overrides must be a list of words, and grid a mapping of lists")
    for key, some in values.items():
        if not isinstance(some, list) or not some:
            raise UserError(f"{where}: grid.{key} must be a list of values, got {some!r}")
    return [*common, *words], values


def _jobs(words: list[Any], values: dict[str, list[Any]]) -> Jobs:
    """Return the words of each run: those of all, and the product of the values."""
    choices = [[_words(key, value) for value in some] for key, some in values.items()]
    return [[*map(str, words), *itertools.chain(*job)] for job in itertools.product(*choices)]


def _words(key: str, value: Any) -> list[str]:
    """Return the words of a value; a list is several words that are set together."""
    if isinstance(value, list):
        return [str(word) for word in value]
    return [f"{key}={value if isinstance(value, str) else Override._get_value_element_as_str(value)}"]


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _path_of(name: str) -> Path:
    if _is_path(name):
        PATH.check("the file of a study", name)
        return Path(name)
    check_name("study", studies(), name)
    return CONF / "sweep" / f"{name}.yaml"
