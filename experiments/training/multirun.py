"""Check all runs of Hydra's -m before the first one starts."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, flag_override

from experiments.config.compose import compose_runs, expand
from experiments.config.errors import UserError
from experiments.config.hydra_command import Refused
from experiments.launching.rank_environment import read_rank_environment
from experiments.runs.before_start import check_outputs, distinct
from experiments.runs.run_folder import RunFolder, folder_of

_folders: list[RunFolder] = []  # of the runs of -m


class Multirun(Callback):
    """Hydra calls this where -m begins; conf/train.yaml names it."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check the runs of a grid; those that another sweeper chooses are checked as they come.

        Raises:
            Refused: a run could not start, or two are the same.
        """
        try:
            if read_rank_environment():
                raise UserError("-m starts one group of workers per run: call it without torchrun or srun")
            if config.hydra.runtime.choices["hydra/sweeper"] == "basic":
                _check_grid(config)
        except Exception as error:
            raise Refused(error) from None


def not_done() -> str:
    """Return the names of the runs that -m has begun with and that are not done."""
    return ", ".join(folder.path.name for folder in _folders if not folder.is_done())


def _check_grid(config: DictConfig) -> None:
    searched = [f"{key}={values}" for key, values in (config.hydra.sweeper.get("params") or {}).items()]
    jobs = expand([*searched, *config.hydra.overrides.task])
    _, configs = distinct(jobs, compose_runs(_numbered(jobs, config), name=config.hydra.job.config_name))
    from experiments.training.preflight import check_runs  # imports torch: most mistakes are reported before that

    check_runs(configs)
    check_outputs(configs)
    _folders[:] = map(folder_of, configs)


def _numbered(jobs: Iterable[list[str]], config: DictConfig) -> Iterator[list[str]]:
    """Yield each job, while ``${hydra:job.num}`` is its number."""
    known = deepcopy(config)
    for number, job in enumerate(jobs):
        with flag_override(known.hydra, ["struct", "readonly"], [False, False]):
            known.hydra.job.num, known.hydra.job.id = number, str(number)
        HydraConfig.instance().set_config(known)
        yield job
