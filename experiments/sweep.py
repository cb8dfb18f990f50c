"""Run a study: ``python -m experiments.sweep NAME`` for the grid in conf/sweep/NAME.yaml.

Every run of the grid is checked before the first one starts. Runs that are finished are skipped, so that a sweep that
was broken off goes on where it was; a run that fails does not keep the others from running.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from experiments.harness.compose import CONF, compose_all
from experiments.harness.config import TrainConfig
from experiments.harness.errors import UserError, suggestion
from experiments.harness.launch import RankFailure
from experiments.harness.progress import SweepProgress
from experiments.harness.run import execute, folder_of, label, num_steps
from micro import NonFiniteGradient


def main() -> None:
    """Read the command line and run the study; exit 2 for a mistake, 1 if any run failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"a study of conf/sweep/: {', '.join(studies())}")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings for every run of the study")
    parser.add_argument("--list", action="store_true", help="show the runs and their state, start none")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        configs = compose_all(jobs(arguments.name, arguments.overrides))
        failures = _show(configs) if arguments.list else run_all(configs, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if failures:
        console.print(_failure_table(failures))
        sys.exit(1)


def studies() -> list[str]:
    """Return the names of all studies."""
    return sorted(path.stem for path in (CONF / "sweep").glob("*.yaml"))


def jobs(name: str, overrides: list[str]) -> list[list[str]]:
    """Return one list of overrides per run of a study: the product of its grid.

    A value of the grid that is a list of words stands for all of them, whatever the key is called: so may two settings
    change together.

    Raises:
        UserError: no such study, or its file is not one.
    """
    if name not in studies():
        raise UserError(f"study must be one of {', '.join(studies())}, got '{name}'{suggestion(name, studies())}")
    path: Path = CONF / "sweep" / f"{name}.yaml"
    try:
        study = OmegaConf.to_container(OmegaConf.load(path))
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(study, dict) or set(study) != {"overrides", "grid"}:
        raise UserError(f"{path} must have the keys overrides and grid")
    choices = [[_words(key, value) for value in values] for key, values in study["grid"].items()]
    return [[*study["overrides"], *itertools.chain(*job), *overrides] for job in itertools.product(*choices)]


def _words(key: str, value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else [f"{key}={value}"]


def run_all(configs: list[TrainConfig], console: Console) -> dict[str, str]:
    """Run what is not finished, one after another; return what failed, by run."""
    progress = SweepProgress(len(configs), console)
    done = sum(folder_of(config).is_done() for config in configs)
    if done:
        console.print(f"{done} of {len(configs)} runs are done already; remove their folders to run them again")
    failures: dict[str, str] = {}
    for config in configs:
        folder = folder_of(config)
        if folder.is_done():
            progress.skip()
            continue
        try:
            execute(config, lambda c, f: progress.watch(f.path, total_steps=num_steps(c), label=label(c)))
        except (RankFailure, NonFiniteGradient, UserError) as error:
            console.print(f"failed: {folder.path.name}: {error}", markup=False, highlight=False)
            failures[folder.path.name] = str(error)
    return failures


def _show(configs: list[TrainConfig]) -> dict[str, str]:
    for config in configs:
        folder = folder_of(config)
        print("done   " if folder.is_done() else "to run ", folder.path)
    return {}


def _failure_table(failures: dict[str, str]) -> Table:
    table = Table("run", "why", title=f"{len(failures)} failed")
    for run, why in failures.items():
        table.add_row(run, why)
    return table


if __name__ == "__main__":
    main()
