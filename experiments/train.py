"""Train one model with one method, or sweep over several with -m.

    python -m experiments.train model=resnet20 dataset=cifar10 dataset.root=DIR sparsifier=micro density=0.001
    python -m experiments.train -m sparsifier=dense,topk,micro seed=0,1

The command starts its workers; under torchrun or srun it joins their ranks. A finished run is skipped. An unfinished
run resumes from its last checkpoint and rewrites later records. Ctrl-C, SIGTERM and SIGUSR1 save a run and stop it; a
second Ctrl-C stops without saving.

The command line is Hydra's. micro-train is the same command; eval "$(micro-train -sc install=bash)" completes it in a
shell.
"""

import sys
from contextlib import chdir

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.config import CONF
from experiments.config.command_line import run_command
from experiments.config.compose import NAME, typed
from experiments.config.stopping import leave
from experiments.launching.rank_environment import check_shape, read_rank_environment
from experiments.training.hydra_command import job_of_hydra, run_by_hydra


@hydra.main(config_path=str(CONF), config_name=NAME, version_base="1.3")
def run(composed: DictConfig) -> float | None:
    """Run one training; return its last measure, which a sweeper may optimize."""
    job = HydraConfig.get()
    with job_of_hydra(), chdir(job.runtime.cwd):  # the directory of the command, even with hydra.job.chdir=true
        ranks = read_rank_environment()
        if ranks:
            check_shape(job.overrides.task, ranks)
        config = typed(composed, joined_world_size=ranks.world_size if ranks else None)
        from experiments.training.run import carry_out  # imports torch: report most mistakes before

        return carry_out(config, ranks)


def main() -> None:
    """Run the command; exit 2 for a mistake, 1 for a failed run."""
    code = run_command(lambda: run_by_hydra(run, sys.argv[1:]), at_stop=leave)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
