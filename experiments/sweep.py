"""Run a study: ``python -m experiments.sweep NAME [KEY=VALUE ...]`` for the grid in conf/sweep/NAME.yaml, or a file.

Every run of the grid is checked before the first one starts. Runs that are finished are skipped, and one that was
broken off goes on where it was; a run that fails does not keep the others from running.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from yaml import YAMLError

from experiments.config.compose import compose_runs
from experiments.config.errors import UserError, suggestion
from experiments.config.repository import CONF
from experiments.config.schema import TrainConfig
from experiments.launching.rank_environment import read_rank_environment
from experiments.runs.cleaning import removable, remove
from experiments.runs.run_folder import folder_of
from experiments.runs.saved_run import compare_weights, find_run
from experiments.runs.status import state_of
from experiments.sweeps.outcome import ON_ERROR, Outcome
from experiments.sweeps.parallelism import check_jobs, num_at_once
from experiments.sweeps.summaries import failure_table, plan_table, removal_table, show, status_table

BACKENDS = ("local", "slurm")
_STUDY = "a yaml file, or a study of conf/sweep/"
_PROG = "python -m experiments.sweep"
_VERBS_HELP = """
  %(prog)s status NAME [KEY=VALUE ...]      what became of each run
  %(prog)s rerun RUN                        run exactly what a run folder says again, in a new folder
  %(prog)s clean NAME [KEY=VALUE ...]       remove the folders of runs that failed or were broken off
"""


def main() -> None:
    """Read the command line and do what it says; exit 2 for a mistake, 1 if any run failed."""
    words = sys.argv[1:]
    verb = VERBS.get(words[0]) if words else None
    try:
        _refuse_verbs_as_names()
        sys.exit(verb(words[1:]) if verb else _run(words))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def studies() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))


def jobs(name: str, overrides: list[str]) -> list[list[str]]:
    """Return one list of overrides per run of a study, which is named or a yaml file: the product of its grid.

    A value of the grid that is a list of words stands for all of them, whatever the key is called: so may two settings
    change together.

    Raises:
        UserError: no such study, or its file is not one.
    """
    path = _path_of(name)
    try:
        study = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(study, dict) or set(study) != {"overrides", "grid"}:
        raise UserError(f"{path} must have the keys overrides and grid")
    fixed, grid = study["overrides"] or [], study["grid"] or {}
    if not isinstance(fixed, list) or not isinstance(grid, dict):
        raise UserError(f"{path}: overrides must be a list of words, and grid a mapping of lists")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid.{key} must be a list of values, got {values!r}")
    choices = [[_words(key, value) for value in values] for key, values in grid.items()]
    return [[*map(str, fixed), *itertools.chain(*job), *overrides] for job in itertools.product(*choices)]


def _path_of(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in studies():
        raise UserError(f"study must be one of {', '.join(studies())}, got '{name}'{suggestion(name, studies())}")
    return CONF / "sweep" / f"{name}.yaml"


def _words(key: str, value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else [f"{key}={value}"]


def distinct(jobs: list[list[str]], configs: list[TrainConfig]) -> tuple[list[list[str]], list[TrainConfig]]:
    """Return the runs with a folder each; what sends everything is one run, whatever densities a study asks it for.

    Raises:
        UserError: two other runs would share a folder.
    """
    first: dict[Path, int] = {}
    for number, config in enumerate(configs):
        path = folder_of(config).path
        before = first.setdefault(path, number)
        if before != number and not config.sparsifier.sends_everything:
            one, other = jobs[before], jobs[number]
            words = [word for pair in itertools.zip_longest(one, other) if pair[0] != pair[1] for word in pair if word]
            how = f"{' '.join(words)} makes no difference" if words else "they are the same"
            raise UserError(f"two runs would share the folder {path.name}: {how}; name each combination once")
    return [jobs[number] for number in first.values()], [configs[number] for number in first.values()]


def _run(words: list[str]) -> int:
    parser = _parser(f"{_STUDY}: {', '.join(studies())}", epilog=_VERBS_HELP)
    parser.add_argument("--list", action="store_true", help="show the runs and their state, start none")
    parser.add_argument(
        "--dry-run", action="store_true", help="the same; with backend=slurm show what would be submitted"
    )
    parser.add_argument("--jobs", metavar="N", help="runs at the same time, also as a word jobs=N; auto: by cores")
    parser.add_argument("--on-error", choices=ON_ERROR, default="continue", help="whether to go on after a failure")
    given = parser.parse_intermixed_args(words)
    settings, overrides = _taken(given.words, {"backend": "local", "jobs": given.jobs or "auto"})
    check_jobs(settings["jobs"])
    if settings["backend"] not in BACKENDS:
        raise UserError(f"backend must be one of {', '.join(BACKENDS)}, got '{settings['backend']}'")
    if read_rank_environment():
        raise UserError("a sweep starts the workers of each run: call it without torchrun or srun")
    grid = jobs(given.name, overrides)
    from experiments.training.preflight import prepare_runs  # imports torch

    grid, configs = distinct(grid, prepare_runs(grid))
    if given.list or (given.dry_run and settings["backend"] == "local"):
        return _list(given.name, configs)
    if settings["backend"] == "slurm":
        if settings["jobs"] != "auto":
            raise UserError(f"jobs={settings['jobs']} is of backend=local; SLURM decides how many runs go on at once")
        return _submit(Path(given.name).stem, grid, configs, dry_run=given.dry_run)
    return _carry_out(given.name, configs, jobs=settings["jobs"], on_error=given.on_error)


def _list(name: str, configs: list[TrainConfig]) -> int:
    show(plan_table(name, configs), Console())
    for config in configs:
        folder = folder_of(config)
        print(f"{state_of(folder):12} {folder.path}")
    return 0


def _submit(name: str, grid: list[list[str]], configs: list[TrainConfig], *, dry_run: bool) -> int:
    from experiments.sweeps.slurm_queue import submit_array  # only where there is a cluster

    print(submit_array(name, grid, configs, dry_run=dry_run))
    return 0


def _carry_out(name: str, configs: list[TrainConfig], *, jobs: str, on_error: str) -> int:
    from experiments.sweeps.local_sweep import run_all  # imports torch

    console = Console(stderr=True)
    num_at_once(configs, jobs)  # a mistake comes before the table
    show(plan_table(name, configs), console)
    return _tell(run_all(configs, console, jobs=jobs, on_error=on_error), len(configs), console)


def _tell(outcome: Outcome, total: int, console: Console) -> int:
    """Say what a sweep came to; return its exit code."""
    if outcome.failures:
        show(failure_table(outcome.failures), console)
    done = total - len(outcome.failures) - outcome.num_left
    rest = f", {outcome.num_left} left: the same command goes on" if outcome.num_left else ""
    print(f"{done} of {total} runs done, {len(outcome.failures)} failed{rest}", file=sys.stderr)
    return outcome.exit_code


def _status(words: list[str]) -> int:
    given = _parser(_STUDY, verb="status").parse_args(words)
    show(status_table(_composed(given.name, given.words)), Console())
    return 0


def _rerun(words: list[str]) -> int:
    from experiments.sweeps.rerun import rerun  # imports torch

    parser = _parser("the folder of a run, or its name under output", verb="rerun", metavar="RUN")
    given = parser.parse_args(words)
    output = Path(str(OmegaConf.select(OmegaConf.load(CONF / "train.yaml"), "output")))
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
    folders = removable(map(folder_of, _composed(given.name, given.words)), finished_too=given.all)
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
        raise UserError("nobody can be asked here: add --yes to remove them")
    return input(question).strip().lower() in ("y", "yes")


VERBS: dict[str, Callable[[list[str]], int]] = {"status": _status, "rerun": _rerun, "clean": _clean}


def _refuse_verbs_as_names() -> None:
    for verb in VERBS:
        if verb in studies():
            raise UserError(
                f"conf/sweep/{verb}.yaml: a study cannot be called {verb}, which this command does: rename it"
            )


def _composed(name: str, overrides: list[str]) -> list[TrainConfig]:
    """Return the runs of a study, as far as they can be checked without their data."""
    grid = jobs(name, overrides)
    return distinct(grid, compose_runs(grid))[1]


def _parser(what: str, *, verb: str = "", metavar: str = "NAME", epilog: str | None = None) -> argparse.ArgumentParser:
    doc = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog=f"{_PROG} {verb}".strip(),
        description=None if verb else doc,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar=metavar, help=what)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings for every run")
    return parser


def _taken(words: list[str], settings: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Take the words of the sweep itself out of those of its runs."""
    split = [(word, *word.partition("=")[::2]) for word in words]
    own = {key: value for _, key, value in split if key in settings}
    return settings | own, [word for word, key, _ in split if key not in settings]


if __name__ == "__main__":
    main()
