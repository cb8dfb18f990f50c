"""Repeat a run with the configuration in its folder; the new run has its own folder."""

import itertools
import sys
from pathlib import Path

from experiments.config.errors import UserError
from experiments.runs.atomic_files import DiskError
from experiments.runs.run_folder import RunFolder
from experiments.runs.same_data import checksums_of, other_data
from experiments.runs.saved_run import code_differences, find_run, lacking_settings, saved_config
from experiments.sweeps.attempt import attempt
from experiments.sweeps.outcome import Outcome
from experiments.training.preflight import check_run
from experiments.training.runner import show_progress


def rerun(run: str, overrides: list[str], *, output: Path) -> tuple[RunFolder, Outcome]:
    """Repeat a run with the same configuration in ``NAME-rerun-K`` beside it; the run itself is only read.

    An interrupted rerun is resumed.

    Args:
        run: The run's folder, or its name under ``output``.
        overrides: KEY=VALUE of settings that do not change the result, such as the root of the data or the output.

    Raises:
        UserError: no such run, a configuration that this version cannot read, or an override that changes the result.
    """
    original = find_run(run, output)
    config = saved_config(original, overrides)
    check_run(config)
    if changed := other_data(original, checksums_of(config.dataset)):
        raise UserError(f"{original.path} was trained on other data than {config.dataset.root} has: {changed}")
    parent = Path(config.output) if _sets(overrides, "output") else original.path.parent
    config.output = str(parent)
    for line in [*lacking_settings(original), *code_differences(original)]:
        print(f"warning: {line}", file=sys.stderr)
    folder = free_folder(parent / original.path.name)
    outcome = Outcome()
    try:
        why = attempt(config, folder, show_progress)
    except DiskError as error:
        why = str(error)
    if why:
        outcome.add_failure(folder, why)
    return folder, outcome


def free_folder(path: Path) -> RunFolder:
    """Return the first of ``NAME-rerun-1``, ``-2`` ... that is not finished and not in use."""
    numbered = (RunFolder(path.with_name(f"{path.name}-rerun-{number}")) for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.is_done() and not folder.is_locked())


def _sets(overrides: list[str], key: str) -> bool:
    return any(override.startswith(f"{key}=") for override in overrides)
