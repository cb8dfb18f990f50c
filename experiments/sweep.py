"""Run a study: ``python -m experiments.sweep NAME [KEY=VALUE ...]`` for the grids in conf/sweep/NAME.yaml, or a file.

Every run of the grid is checked before the first one starts. Finished runs are skipped, unfinished ones resume from
their last checkpoint, and after a failed run the others still run.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from experiments.config import CONF
from experiments.config.command_line import Parser, run_command
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.config.stopping import leave
from experiments.launching.rank_environment import read_rank_environment
from experiments.runs.before_start import check_outputs, check_requests
from experiments.runs.manifest import other_code
from experiments.runs.run_folder import folder_of
from experiments.runs.status import State, state_of
from experiments.sweeps.listing import counted, lines_of, removable, remove
from experiments.sweeps.num_jobs import num_at_once
from experiments.sweeps.slurm_queue import queued_folders, submit_array
from experiments.sweeps.study import runs_of, studies

_STUDY = "a yaml file, or a study of conf/sweep/, with /PART for one of its parts"
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
    parser.add_argument("--list", action="store_true", help="show the runs and their state, start nothing")
    parser.add_argument(
        "--dry-run", action="store_true", help="as --list; for SLURM: print the job script, submit nothing"
    )
    parser.add_argument("--jobs", metavar="N", default="auto", help="runs at once; auto: by cores (%(default)s)")
    parser.add_argument(
        "--backend", choices=("local", "slurm"), default="local", help="where runs are executed (%(default)s)"
    )
    parser.add_argument("--on-error", choices=("continue", "stop"), default="continue", help="after a failed run")
    given = parser.parse_intermixed_args(words)
    if read_rank_environment():
        raise UserError("a sweep starts the workers of each run: call it without torchrun or srun")
    grid, configs, merged = runs_of(given.name, given.words)
    at_once = num_at_once(configs, given.jobs)
    if merged:
        print(f"note: {merged}", file=sys.stderr)
    if given.list or (given.dry_run and given.backend == "local"):
        return _list(configs)
    if given.backend == "slurm" and given.jobs != "auto":
        raise UserError(f"--jobs {given.jobs} is for --backend local; cluster.slurm.throttle is SLURM's limit")
    if not given.dry_run:
        from experiments.training.preflight import check_runs  # imports torch: mistakes are reported before that

        check_runs(configs)
    if given.backend == "slurm":
        name = Path(given.name).stem if Path(given.name).suffix else given.name
        print(submit_array(name, grid, configs, dry_run=given.dry_run))
        return 0
    return _carry_out(configs, at_once=at_once, on_error=given.on_error)


def _list(configs: list[TrainConfig]) -> int:
    check_outputs(configs, by_writing=False)
    print(*lines_of([folder_of(config) for config in configs], queued_folders(configs)), sep="\n")
    return 0


def _carry_out(configs: list[TrainConfig], *, at_once: int, on_error: str) -> int:
    from experiments.sweeps.local_sweep import LocalSweep

    check_outputs(configs)
    check_requests(configs)
    runs = {folder_of(config): config for config in configs}
    states = {folder: state_of(folder) for folder in runs}
    if line := other_code([folder for folder, state in states.items() if state == State.DONE]):
        print(f"note: {line}", file=sys.stderr)
    print(counted(states.values()), flush=True)
    return LocalSweep(runs, at_once=at_once, on_error=on_error).run()


def _status(words: list[str]) -> int:
    given = _parser(_STUDY, verb="status").parse_args(words)
    return _list(runs_of(given.name, given.words).configs)


def _rerun(words: list[str]) -> int:
    given = _parser("the folder of a run, or its name under output", verb="rerun", metavar="RUN").parse_args(words)
    from experiments.sweeps.rerun import rerun  # imports torch

    return rerun(given.name, given.words, output=Path(str(read_yaml(CONF / "train.yaml")["output"])))


def _clean(words: list[str]) -> int:
    parser = _parser(_STUDY, verb="clean")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--all", action="store_true", help="finished runs too")
    given = parser.parse_intermixed_args(words)
    configs = runs_of(given.name, given.words).configs
    check_outputs(configs, by_writing=False)
    queued = queued_folders(configs)  # they go on from their checkpoints
    found = removable(dict.fromkeys(map(folder_of, configs)), finished_too=given.all)
    folders = [folder for folder in found if folder not in queued]
    if not folders:
        print("nothing to remove")
        return 0
    print(*lines_of(folders), sep="\n")
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


def _parser(what: str, *, verb: str = "", metavar: str = "NAME", epilog: str | None = None) -> Parser:
    doc = None if verb else (__doc__ or "").splitlines()[0]
    parser = Parser(prog=f"python -m experiments.sweep {verb}".strip(), description=doc, epilog=epilog)
    parser.add_argument("name", metavar=metavar, help=what)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings for every run")
    return parser


if __name__ == "__main__":
    main()
