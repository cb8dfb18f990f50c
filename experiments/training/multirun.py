"""What is added to Hydra's -m: all its runs are checked before the first one starts."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, flag_override

from experiments.config.compose import compose_runs
from experiments.config.errors import UserError
from experiments.config.hydra_command import Refused
from experiments.config.overrides import each_value, expand
from experiments.launching.rank_environment import read_rank_environment
from experiments.runs.output import check_outputs, distinct


class Multirun(Callback):
    """Hydra calls this where -m begins; conf/train.yaml names it."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check all runs. Raises: Refused: one is wrong."""
        try:
            _check(config)
        except Exception as error:
            raise Refused(error) from None


def _check(config: DictConfig) -> None:
    """Check what can be known of all jobs of -m: each of them, or where a sweeper chooses them, each value that it may.

    Raises:
        UserError: a run that could not start, or two that are the same.
    """
    if read_rank_environment():
        raise UserError("-m starts one group of workers per run: call it without torchrun or srun")
    searched = [f"{key}={values}" for key, values in (config.hydra.sweeper.get("params") or {}).items()]
    words = [*searched, *config.hydra.overrides.task]
    is_grid = config.hydra.runtime.choices["hydra/sweeper"] == "basic"
    jobs = expand(words) if is_grid else each_value(words)
    configs = compose_runs(_numbered(jobs, config), name=config.hydra.job.config_name)
    if is_grid:
        _, configs = distinct(jobs, configs)
    from experiments.training.preflight import check_runs  # imports torch: most mistakes are reported before that

    check_runs(configs)
    check_outputs(configs)


def _numbered(jobs: Iterable[list[str]], config: DictConfig) -> Iterator[list[str]]:
    """Yield each job, while ``${hydra:job.num}`` is its number."""
    known = deepcopy(config)
    for number, job in enumerate(jobs):
        with flag_override(known.hydra, ["struct", "readonly"], [False, False]):
            known.hydra.job.num, known.hydra.job.id = number, str(number)
        HydraConfig.instance().set_config(known)
        yield job
