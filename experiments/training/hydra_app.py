"""What Hydra itself does for experiments.train: show a configuration (--cfg job), or hand runs to a launcher.

With hydra/launcher=submitit_slurm each run of -m is a SLURM job, which composes and checks its own configuration.
"""

import sys
from typing import Any

import hydra
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config.compose import compose_runs, typed
from experiments.config.errors import UserError, one_line_of_hydra
from experiments.config.overrides import expand, is_of_hydra, parse, with_field_name
from experiments.config.paths import CONF
from experiments.config.schema import TrainConfig
from experiments.launching.meeting import check_master
from experiments.launching.rank_environment import check_shape, read_rank_environment
from experiments.runs.output import check_outputs
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, failure_reason, judge, state_of
from experiments.training.hydra_errors import hydra_errors

_failures: list[str] = []


def run_by_hydra(words: list[str], *, multirun: bool) -> int:
    """Give the words of the command line to Hydra; return 1 if a run failed. Raises: UserError."""
    sys.argv[1:] = map(with_field_name, sys.argv[1:])
    with hydra_errors(words):
        folders = _checked_folders(words) if multirun else []
        _run()
    unfinished = [] if _failures else [folder for folder in folders if state_of(folder) != State.DONE]
    for line in [*_failures, *(f"{folder.path.name}: {_why(folder)}" for folder in unfinished)]:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(_failures or unfinished))


def _checked_folders(words: list[str]) -> list[RunFolder]:
    """Check all runs before a launcher starts the first; return their folders."""
    if any(word.startswith("-") and word not in ("-m", "--multirun") for word in words):
        return []  # --cfg only prints; --config-dir adds files that only Hydra reads
    from experiments.training.preflight import check_runs
    from experiments.training.runs_of_command import refuse_same_runs

    if read_rank_environment():
        raise UserError("-m starts one group of workers per run: call it without torchrun or srun")
    own = [word for word in words if not word.startswith("-") and not is_of_hydra(word)]
    configs = compose_runs(expand(own, multirun=True))
    check_runs(configs)
    refuse_same_runs(configs)
    check_outputs(configs)
    return [folder_of(config) for config in configs]


def _why(folder: RunFolder) -> str:
    verdict = judge(folder)
    return verdict.problem or failure_reason(folder) or f"is {verdict.state}, not done; see the output of its launcher"


@hydra.main(config_path=str(CONF), config_name="train", version_base="1.3")
def _run(composed: DictConfig) -> None:
    from experiments.training.preflight import check_run
    from experiments.training.runs_of_command import carry_out_one

    try:
        ranks = read_rank_environment()
        if ranks:
            check_shape(HydraConfig.get().overrides.task, ranks)
        config = _typed(composed, joined_world_size=ranks.world_size if ranks else None)
        check_run(config)
        if ranks:
            check_master(ranks)
        if ranks is None or ranks.rank == 0:
            check_outputs([config])
        problem = carry_out_one(config, ranks)
    except UserError as error:
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            raise
        problem = str(error)
    if problem:
        _failures.append(problem)


def _typed(composed: DictConfig, **kwargs: Any) -> TrainConfig:
    words = list(HydraConfig.get().overrides.task)
    keys = [override.key_or_group for override in parse(words)]
    try:
        if "experiment" in keys:  # a model or data set of the command line keeps its own file's settings
            for group in {"model", "dataset"} & set(keys):
                own = [word for word, key in zip(words, keys, strict=True) if key.split(".")[0] == group]
                composed[group] = compose("train", own)[group]
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(one_line_of_hydra(error)) from None
    assert isinstance(values, dict)
    return typed({str(key): value for key, value in values.items()}, **kwargs)
