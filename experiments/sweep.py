"""Run a study: ``python -m experiments.sweep NAME [KEY=VALUE ...]`` for the grid in conf/sweep/NAME.yaml, or a file.

Every run of the grid is checked before the first one starts. Finished runs are skipped, unfinished ones resume from
their last checkpoint, and after a failed run the others still run.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from experiments.config.command_line import Parser, run_command
from experiments.config.compose import compose_runs
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError
from experiments.config.paths import CONF
from experiments.config.schema import TrainConfig
from experiments.config.stopping import leave
from experiments.launching.rank_environment import read_rank_environment
from experiments.runs.cleaning import removable, remove
from experiments.runs.finished_requests import check_requests
from experiments.runs.output import check_are_folders, check_outputs, distinct
from experiments.runs.run_folder import folder_of
from experiments.runs.saved_run import compare_weights, find_run, other_code
from experiments.runs.status import State, state_of
from experiments.sweeps.num_jobs import check_jobs, num_at_once
from experiments.sweeps.outcome import ON_ERROR, Outcome
from experiments.sweeps.slurm_queue import queued_folders, submit_array
from experiments.sweeps.study import jobs_of, studies
from experiments.sweeps.summaries import failure_table, plan_table, removal_table, show, state_with_queue, status_table

BACKENDS = ("local", "slurm")
_STUDY = "a yaml file, or a study of conf/sweep/"
_PROG = "python -m experiments.sweep"
_VERBS_HELP = """
  %(prog)s status NAME [KEY=VALUE ...]      the state of each run
  %(prog)s rerun RUN                        run the configuration of a run folder again, in a new folder
  %(prog)s clean NAME [KEY=VALUE ...]       remove the folders of failed and of stopped runs
"""


def main() -> None:
    """Read the command line and do what it says; exit 2 for a mistake, 1 if any run failed."""
    words = sys.argv[1:]
    verb = VERBS.get(words[0]) if words else None
    sys.exit(run_command(lambda: (verb or _run)(words[1:] if verb else words), at_stop=leave))


def _run(words: list[str]) -> int:
    parser = _parser(f"{_STUDY}: {', '.join(studies())}", epilog=_VERBS_HELP)
    parser.add_argument("--list", action="store_true", help="show the runs and their state, start none")
    parser.add_argument("--dry-run", action="store_true", help="the same; for SLURM: what would be submitted")
    parser.add_argument("--jobs", metavar="N", default="auto", help="runs at once; auto: by cores (%(default)s)")
    parser.add_argument("--backend", choices=BACKENDS, default="local", help="this machine, or SLURM (%(default)s)")
    parser.add_argument("--on-error", choices=ON_ERROR, default="continue", help="after a failed run (%(default)s)")
    given = parser.parse_intermixed_args(words)
    _refuse_verbs_as_names()
    check_jobs(given.jobs)
    _refuse_options_as_words(given.words)
    if read_rank_environment():
        raise UserError("a sweep starts the workers of each run: call it without torchrun or srun")
    grid = jobs_of(given.name, given.words)
    grid, configs = distinct(grid, compose_runs(grid))
    if given.list or (given.dry_run and given.backend == "local"):
        return _list(given.name, configs)
    if given.backend == "slurm":
        if given.jobs != "auto":
            raise UserError(f"--jobs {given.jobs} is for --backend local; SLURM decides how many runs go on at once")
        return _submit(Path(given.name).stem, grid, configs, dry_run=given.dry_run)
    return _carry_out(given.name, configs, jobs=given.jobs, on_error=given.on_error)


def _refuse_options_as_words(words: list[str]) -> None:
    for word in words:
        key, _, value = word.partition("=")
        if key in ("jobs", "backend"):
            raise UserError(f"'{word}' is no setting of a run: use the option --{key} {value}")


def _list(name: str, configs: list[TrainConfig]) -> int:
    check_are_folders(configs)
    queued = queued_folders(configs)
    show(plan_table(name, configs, queued), Console())
    for config in configs:
        folder = folder_of(config)
        print(f"{state_with_queue(folder, queued):12} {folder.path}")
    return 0


def _submit(name: str, grid: list[list[str]], configs: list[TrainConfig], *, dry_run: bool) -> int:
    from experiments.sweeps.check_process import check_in_process

    check_in_process(configs)
    print(submit_array(name, grid, configs, dry_run=dry_run))
    return 0


def _carry_out(name: str, configs: list[TrainConfig], *, jobs: str, on_error: str) -> int:
    num_at_once(configs, jobs)  # a mistake comes before torch is imported, and before the table
    from experiments.sweeps.local_sweep import run_all
    from experiments.training.preflight import check_runs

    check_runs(configs)
    check_outputs(configs)
    check_requests(configs)
    console = Console(stderr=True)
    for line in other_code([folder for folder in map(folder_of, configs) if state_of(folder) == State.DONE]):
        print(f"note: {line}", file=sys.stderr)
    show(plan_table(name, configs), console)
    return _report(run_all(configs, console, jobs=jobs, on_error=on_error), len(configs), console)


def _report(outcome: Outcome, total: int, console: Console) -> int:
    """Say what a sweep came to; return its exit code."""
    if outcome.failures:
        show(failure_table(outcome.failures), console)
    done = total - len(outcome.failures) - outcome.num_left
    rest = f", {outcome.num_left} left: run the same command to resume" if outcome.num_left else ""
    elsewhere = f" ({outcome.num_elsewhere} by another process)" if outcome.num_elsewhere else ""
    print(f"{done} of {total} runs done{elsewhere}, {len(outcome.failures)} failed{rest}", file=sys.stderr)
    return outcome.exit_code


def _status(words: list[str]) -> int:
    given = _parser(_STUDY, verb="status").parse_args(words)
    _refuse_verbs_as_names()
    configs = _composed(given.name, given.words)
    show(status_table(configs, queued_folders(configs)), Console())
    return 0


def _rerun(words: list[str]) -> int:
    from experiments.sweeps.rerun import rerun  # imports torch

    parser = _parser("the folder of a run, or its name under output", verb="rerun", metavar="RUN")
    given = parser.parse_args(words)
    output = Path(str(read_yaml(CONF / "train.yaml")["output"]))
    original = find_run(given.name, output)
    folder, outcome = rerun(str(original.path), given.words, output=output)
    for failure in outcome.failures:
        print(f"error: {failure.run}: {failure.why}", file=sys.stderr)
    if folder.is_done():
        print(f"done: {folder.path}: {compare_weights(original, folder)}")
    return outcome.exit_code


def _clean(words: list[str]) -> int:
    parser = _parser(_STUDY, verb="clean")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--all", action="store_true", help="finished runs too")
    given = parser.parse_intermixed_args(words)
    configs = _composed(given.name, given.words)
    queued = queued_folders(configs)  # they go on from their checkpoints
    folders = [each for each in removable(map(folder_of, configs), finished_too=given.all) if each not in queued]
    if not folders:
        print("nothing to remove")
        return 0
    show(removal_table(folders), Console())
    if not given.yes and not _agreed(f"remove {len(folders)} folders? [y/N] "):
        print("nothing removed")
        return 0
    stayed = remove(folders)
    print(f"removed {len(folders) - len(stayed)} folders", *(f"in use: {folder.path}" for folder in stayed), sep="\n")
    return 1 if stayed else 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError("standard input is no terminal, so the question cannot be asked: add --yes to remove them")
    return input(question).strip().lower() in ("y", "yes")


VERBS: dict[str, Callable[[list[str]], int]] = {"status": _status, "rerun": _rerun, "clean": _clean}


def _refuse_verbs_as_names() -> None:
    for verb in VERBS:
        if verb in studies():
            raise UserError(f"conf/sweep/{verb}.yaml: '{verb}' is a command of experiments.sweep: rename the study")


def _composed(name: str, overrides: list[str]) -> list[TrainConfig]:
    """Return the runs of a study, as far as they can be checked without their data."""
    grid = jobs_of(name, overrides)
    configs = distinct(grid, compose_runs(grid))[1]
    check_are_folders(configs)
    return configs


def _parser(what: str, *, verb: str = "", metavar: str = "NAME", epilog: str | None = None) -> Parser:
    doc = (__doc__ or "").splitlines()[0]
    parser = Parser(
        prog=f"{_PROG} {verb}".strip(),
        description=None if verb else doc,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar=metavar, help=what)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings for every run")
    return parser


if __name__ == "__main__":
    main()
