"""What Hydra itself does for experiments.train: show a configuration (--cfg job), call a launcher or a sweeper.

With hydra/launcher=submitit_slurm each run of -m is a SLURM job, which composes and checks its own configuration.
"""

import dataclasses
import re
import sys
from contextlib import chdir
from typing import Any

import hydra
from hydra import compose
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from experiments.config.compose import compose_runs, typed
from experiments.config.errors import UserError, one_line_of_hydra
from experiments.config.overrides import each_value, expand, is_of_hydra, parse
from experiments.config.paths import CONF
from experiments.config.schema import TrainConfig
from experiments.launching.rank_environment import check_shape, read_rank_environment
from experiments.reports.measures import METRICS
from experiments.runs.output import check_outputs, distinct
from experiments.runs.records import LastRow
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, failure_reason, judge, state_of
from experiments.training.hydra_errors import hydra_errors, lost_jobs, split_options

_MULTIRUN = ("-m", "--multirun")
_PLACES = ("hydra.run.dir=", "hydra.sweep.dir=")
_FILES = ["hydra.output_subdir=.hydra", "hydra.sweep.subdir=${hydra.job.num}"]  # where Hydra by default has its files
_failures: list[str] = []
_compose = Hydra.compose_config


class RunFailed(RuntimeError):
    """A run that failed, for a sweeper that has a rule for failures of its own."""


def run_by_hydra(words: list[str], *, multirun: bool) -> int:
    """Give the words of the command line to Hydra; return 1 if a run failed. Raises: UserError."""
    options, words = split_options(words)
    own = [word for word in words if not is_of_hydra(word)]
    has_own_sweeper = any(
        re.match(r"\+*(hydra/sweeper=(?!basic$)|hydra\.sweeper\.(?!max_batch_size=))", word) for word in words
    )
    folders = []
    if multirun and set(options) <= set(_MULTIRUN):  # --cfg only prints; --config-dir adds files that only Hydra reads
        folders = _checked_folders(own, has_own_sweeper=has_own_sweeper)
    files = _FILES if any(word.lstrip("+").startswith(_PLACES) for word in words) else []
    sys.argv[1:] = [*options, *files, *words]
    Hydra.compose_config = _compose_whole  # type: ignore[method-assign]
    _failures.clear()
    lost: list[str] = []
    try:
        with hydra_errors(), lost_jobs(lost):
            _run()
    except RunFailed as error:  # its sweeper goes on no more
        if not _failures:  # the run was in another process
            _failures.append(str(error))
    unfinished = [] if _failures else [each[0] for each in folders if all(state_of(one) != State.DONE for one in each)]
    for line in [*_failures, *lost, *(f"{folder.path.name}: {_why(folder)}" for folder in unfinished)]:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(_failures or lost or unfinished))


def _checked_folders(words: list[str], *, has_own_sweeper: bool) -> list[list[RunFolder]]:
    """Check all runs before a launcher starts the first; return the folders that each may have.

    A launcher may start a run on another machine, where device=auto is another one. None where a sweeper chooses them.
    """
    from experiments.training.preflight import check_runs

    if read_rank_environment():
        raise UserError("-m starts one group of workers per run: call it without torchrun or srun")
    jobs = each_value(words) if has_own_sweeper else expand(words, multirun=True)
    configs = compose_runs(jobs)
    if not has_own_sweeper:
        _, configs = distinct(jobs, configs)
    check_runs(configs)
    check_outputs(configs)
    if has_own_sweeper:
        return []
    devices = [] if any(word.lstrip("+").startswith("cluster.device=") for word in words) else ["cpu", "cuda"]
    others = [
        [dataclasses.replace(c, cluster=dataclasses.replace(c.cluster, device=device)) for device in devices]
        for c in configs
    ]
    return [[folder_of(each) for each in (config, *other)] for config, other in zip(configs, others, strict=True)]


def _why(folder: RunFolder) -> str:
    verdict = judge(folder)
    return verdict.problem or failure_reason(folder) or f"is {verdict.state}, not done; see the output of its launcher"


def _compose_whole(self: Hydra, *given: Any, **settings: Any) -> DictConfig:
    """Compose as Hydra does; where that is printed, fill in what a run fills in."""
    composed = _compose(self, *given, **settings)
    printed = settings.get("from_shell", True) and not settings["with_log_configuration"]
    if printed and settings["run_mode"] is RunMode.RUN:
        HydraConfig.instance().set_config(composed)
        config = _typed(composed)
        with flag_override(composed, ["struct", "readonly"], [False, False]):
            for field in dataclasses.fields(config):
                composed[field.name] = getattr(config, field.name)
    return composed


@hydra.main(config_path=str(CONF), config_name="train", version_base="1.3")
def _run(composed: DictConfig) -> float | None:
    """Carry out a run; return its last measure, which a sweeper may optimize."""
    job = HydraConfig.get()
    with chdir(job.runtime.cwd if job.job.chdir else "."):  # paths mean the folder of the command
        problem, measure = _carry_out(composed)
    if not problem:
        return measure
    _failures.append(problem)
    if job.runtime.choices["hydra/sweeper"] != "basic":
        raise RunFailed(problem)
    return None


def _carry_out(composed: DictConfig) -> tuple[str | None, float | None]:
    """Carry out a run; return why it failed, and its last measure."""
    from experiments.training.preflight import check_run
    from experiments.training.runs_of_command import carry_out_one

    try:
        ranks = read_rank_environment()
        if ranks:
            check_shape(HydraConfig.get().overrides.task, ranks)
        config = _typed(composed)
        if ranks is None:
            check_run(config)
        if ranks is None or ranks.rank == 0:
            check_outputs([config])
        problem = carry_out_one(config, ranks)
    except UserError as error:
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            raise
        return str(error), None
    row = LastRow(folder_of(config).epochs_path).read()
    measured = (row[metric.key] for metric in METRICS if row.get(metric.key) is not None)
    return problem, next(measured, None)


def _typed(composed: DictConfig) -> TrainConfig:
    words = list(HydraConfig.get().overrides.task)
    keys = [override.key_or_group for override in parse(words)]
    ranks = read_rank_environment()
    try:
        if "experiment" in keys:  # a model or data set of the command line keeps its own file's settings
            for group in {"model", "dataset"} & set(keys):
                own = [word for word, key in zip(words, keys, strict=True) if key.split(".")[0] == group]
                composed[group] = compose("train", own)[group]
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(one_line_of_hydra(error)) from None
    assert isinstance(values, dict)
    own_values = {str(key): value for key, value in values.items() if key != "hydra"}
    return typed(own_values, joined_world_size=ranks.world_size if ranks else None)
