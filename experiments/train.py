"""Train one model with one method, or sweep over several with -m.

    python -m experiments.train model=resnet20 dataset=cifar10 dataset.root=DIR sparsifier=micro density=0.001
    python -m experiments.train -m sparsifier=dense,topk,micro seed=0,1

The command starts its own workers. Under torchrun or srun it joins the ranks that it is given. A run that is finished
is not run again; one that was broken off goes on from its last checkpoint, and what it recorded after that is put aside
under attempts/. SIGTERM and SIGUSR1 save it first. With hydra/launcher=submitit_slurm each run of -m is a job of SLURM.
"""

import sys
import traceback

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.config.checks import typed
from experiments.config.compose import expand, take_whole_
from experiments.config.errors import UserError
from experiments.config.repository import CONF
from experiments.launching.failures import RankFailure
from experiments.launching.process_lifetime import leave
from experiments.launching.rank_environment import RankEnvironment, read_rank_environment
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import failure_reason, state_of
from experiments.training.preflight import check_run, prepare_runs
from experiments.training.runner import execute, join
from micro import NonFiniteGradient

failures: list[str] = []


def main() -> None:
    """Check everything that was asked for, then let hydra run it; exit 2 for a mistake, 1 for a failed run."""
    words = sys.argv[1:]
    flags = [word for word in words if word.startswith("-")]
    multirun = bool({"-m", "--multirun"} & set(flags))
    ranks = read_rank_environment()
    folders: list[RunFolder] = []
    if not set(flags) - {"-m", "--multirun"}:  # with --help, --cfg and the like hydra only shows something
        try:
            folders = _check(words, multirun=multirun, ranks=ranks)
        except UserError as error:
            sys.exit(
                _say(f"error: {error}", 2)
            )  # each rank says so: a launcher kills the others when the first one ends
    _run()
    if multirun and not failures:  # a launcher may have run them elsewhere
        failures.extend(
            f"error: {folder.path.name}: {_unfinished(folder)}" for folder in folders if not folder.is_done()
        )
    if failures:
        sys.exit(_say("\n".join(failures), 1))


def _unfinished(folder: RunFolder) -> str:
    return failure_reason(folder) or f"is {state_of(folder)}, not done; see what its launcher left"


def _check(words: list[str], *, multirun: bool, ranks: RankEnvironment | None) -> list[RunFolder]:
    """Check all runs before the first starts; return their folders."""
    if multirun and ranks:
        raise UserError("-m starts one group of workers per run: call it without torchrun or srun")
    overrides = [word for word in words if not word.startswith("-")]
    jobs = expand(overrides, multirun=multirun)
    configs = prepare_runs(jobs, joined_world_size=ranks.world_size if ranks else None)
    folders = [folder_of(config) for config in configs]
    names = [str(folder.path) for folder in folders]
    for name, config in zip(names, configs, strict=True):
        if names.count(name) > 1 and config.sparsifier.selector is not None:  # dense is one run at every density
            raise UserError(f"two runs of this sweep are the same, {name}: name each combination once")
    return folders


@hydra.main(config_path=str(CONF), config_name="train", version_base="1.3")
def _run(composed: DictConfig) -> None:
    ranks = read_rank_environment()
    name = ""
    try:
        take_whole_(composed, list(HydraConfig.get().overrides.task))
        config = typed(composed, joined_world_size=ranks.world_size if ranks else None)
        check_run(config)  # again: with a flag such as --config-dir nothing was checked before
        name = f"{folder_of(config).path.name}: "
        ran = join(config, ranks) if ranks else execute(config)
    except (UserError, RankFailure, NonFiniteGradient) as error:
        if ranks and not isinstance(error, UserError):
            traceback.print_exc()
            leave(1)
        failures.append(f"error: {name}{error}")
        return
    except Exception:
        if ranks is None:
            raise
        traceback.print_exc()  # a peer may be gone: an end that waits for it would keep the launcher from going on
        leave(1)
    if ranks is None or ranks.rank == 0:
        print(f"{'done' if ran else 'already done'}: {folder_of(config).path}")


def _say(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
