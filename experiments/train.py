"""Train one model with one method, or sweep over several with -m.

    python -m experiments.train model=resnet20 dataset=cifar10 dataset.root=DIR sparsifier=micro density=0.001
    python -m experiments.train -m sparsifier=dense,topk,micro seed=0,1

The command starts its own workers; under torchrun or srun it joins the ranks that these start. A finished run is not
run again. An unfinished run resumes from its last checkpoint, and records what came after it anew. Ctrl-C, SIGTERM and
SIGUSR1 save a run and stop it; a second Ctrl-C does not wait for that.

Words are those of Hydra. micro-train is the same command; eval "$(micro-train -sc install=bash)" has a shell complete
it.
"""

import sys
from contextlib import chdir

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.config.command_line import run_command
from experiments.config.compose import NAME, typed
from experiments.config.errors import RunFailed
from experiments.config.hydra_command import job_of_hydra, run_by_hydra
from experiments.config.paths import CONF
from experiments.config.stopping import leave
from experiments.launching.rank_environment import check_shape, read_rank_environment


@hydra.main(config_path=str(CONF), config_name=NAME, version_base="1.3")
def run(composed: DictConfig) -> float | None:
    """Carry out one run; return its last measure, which a sweeper may optimize."""
    job = HydraConfig.get()
    with job_of_hydra(), chdir(job.runtime.cwd):  # where the command was given, also with hydra.job.chdir=true
        ranks = read_rank_environment()
        if ranks:
            check_shape(job.overrides.task, ranks)
        config = typed(composed, joined_world_size=ranks.world_size if ranks else None)
        from experiments.training.run import carry_out  # imports torch: most mistakes are reported before that

        return carry_out(config, ranks)


def main() -> None:
    """Run the command line; exit 2 for a mistake, 1 for a failed run."""
    code = run_command(lambda: _run(sys.argv[1:]), at_stop=leave)
    if code:
        sys.exit(code)


def _run(words: list[str]) -> int:
    try:
        return run_by_hydra(run, words)
    except RunFailed as error:  # of a launcher, which knows jobs and no runs
        from experiments.training.multirun import not_done

        names = not_done()
        raise RunFailed(f"{error}; not done: {names}" if names else str(error)) from error


if __name__ == "__main__":
    main()
