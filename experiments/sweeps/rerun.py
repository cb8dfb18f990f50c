"""Repeat a run with the configuration in its folder, in a folder of its own, and compare the weights."""

import itertools
import sys
from pathlib import Path

from experiments.config.errors import UserError
from experiments.runs.run_folder import RunFolder
from experiments.runs.same_data import checksums_of, other_data
from experiments.runs.saved_run import compare_weights, find_run, other_code, saved_config
from experiments.sweeps.local_sweep import LocalSweep
from experiments.training.preflight import check_run


def rerun(run: str, overrides: list[str], *, output: Path) -> int:
    """Repeat a run in ``NAME-rerun-K`` beside it, which resumes if interrupted; return the exit code of a sweep.

    Args:
        run: the run's folder, or its name under ``output``; it is only read.
        overrides: KEY=VALUE of settings that do not change the result, such as the root of the data or the output.

    Raises:
        UserError: no such run, a configuration that this version cannot read, or an override that changes the result.
    """
    original = find_run(run, output)
    config = saved_config(original, overrides)
    check_run(config)
    if changed := other_data(original, checksums_of(config.dataset)):
        raise UserError(f"{original.path} was trained on other data than {config.dataset.root} has: {changed}")
    if not any(override.startswith("output=") for override in overrides):
        config.output = str(original.path.parent)
    for line in other_code([original]):
        print(f"warning: {line}", file=sys.stderr)
    folder = free_folder(Path(config.output) / original.path.name)
    code = LocalSweep({folder: config}, at_once=1).run()
    if folder.is_done():
        print(f"done: {folder.path}: {compare_weights(original, folder)}")
    return code


def free_folder(path: Path) -> RunFolder:
    """Return the first of ``NAME-rerun-1``, ``-2`` ... that is not finished and not in use."""
    numbered = (RunFolder(path.with_name(f"{path.name}-rerun-{number}")) for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.is_done() and not folder.is_locked())
