"""Train one model with one method, or sweep over several with -m.

    python -m experiments.train model=resnet20 dataset=cifar10 dataset.root=DIR sparsifier=micro density=0.001
    python -m experiments.train -m sparsifier=dense,topk,micro seed=0,1

The command starts its own workers; under torchrun or srun it joins the ranks that these start. A finished run is not
run again. An unfinished run resumes from its last checkpoint; what it recorded after that moves to attempts/ of its
folder. Ctrl-C, SIGTERM and SIGUSR1 save a run and stop it; a second Ctrl-C does not wait for that.
"""

import sys

from experiments.config.command_line import run_command
from experiments.config.stopping import leave

_MULTIRUN = {"-m", "--multirun"}


def main() -> None:
    """Run the command line; exit 2 for a mistake, 1 for a failed run."""
    words = sys.argv[1:]
    work = _help if {"-h", "--help"} & set(words) else lambda: _run(words)
    code = run_command(work, at_stop=leave)
    if code:
        sys.exit(code)


def _help() -> int:
    from experiments.config.help_text import train_help

    print(train_help(__doc__ or ""))
    return 0


def _run(words: list[str]) -> int:
    from experiments.config.compose import compose_runs
    from experiments.config.errors import UserError
    from experiments.config.overrides import expand, is_of_hydra
    from experiments.launching.rank_environment import check_shape, read_rank_environment
    from experiments.runs.output import distinct

    flags = {word for word in words if word.startswith("-")}
    multirun = bool(flags & _MULTIRUN)
    if flags - _MULTIRUN or any(map(is_of_hydra, words)):
        from experiments.training.hydra_app import run_by_hydra

        return run_by_hydra(words, multirun=multirun)
    ranks = read_rank_environment()
    if multirun and ranks:
        raise UserError("-m starts one group of workers per run: call it without torchrun or srun")
    if ranks:
        check_shape(words, ranks)
    jobs = expand([word for word in words if word not in flags], multirun=multirun)
    _, configs = distinct(jobs, compose_runs(jobs, joined_world_size=ranks.world_size if ranks else None))
    from experiments.training.runs_of_command import carry_out  # imports torch: mistakes are reported before that

    return carry_out(configs, ranks)


if __name__ == "__main__":
    main()
