"""Repeat a run with the configuration of its folder in a new folder, and compare the weights."""

import itertools
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import data
from experiments.config.compose import typed
from experiments.config.errors import UserError, as_user_error, suggestion
from experiments.config.identity import NEUTRAL, is_neutral
from experiments.config.schema import TrainConfig
from experiments.runs.files import load_json
from experiments.runs.manifest import other_code, other_data
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import status_of

GROUP_KEYS = ("tracking", "checkpoint", "cluster.slurm")  # members of NEUTRAL that are groups of keys


def rerun(run: str, overrides: list[str], *, output: Path) -> int:
    """Repeat a run in ``NAME-rerun-K`` beside it, which resumes if interrupted; return the exit code of a sweep.

    Args:
        run: the run's folder, or its name under ``output``; it is only read.
        overrides: KEY=VALUE of settings that do not change the result, such as the root of the data or the output.
    """
    from experiments.sweeps.local_sweep import LocalSweep  # slow, like the next: they import torch
    from experiments.training.preflight import check_runs

    original = find_run(run, output)
    config = saved_config(original, overrides)
    check_runs([config])
    dataset = config.dataset
    if changed := other_data(original, data.sums(dataset.name, dataset.root, **dataset.settings)):
        raise UserError(f"{original.path} was trained on other data than {dataset.root} has: {changed}")
    if not any(override.startswith("output=") for override in overrides):
        config.output = str(original.path.parent)
    if line := other_code([original]):
        print(f"warning: {line}", file=sys.stderr)
    folder = free_folder(Path(config.output) / original.path.name)
    code = LocalSweep({folder: config}, at_once=1).run()
    if folder.is_done():
        print(f"done: {folder.path}: {compare_weights(original, folder)}")
    return code


def find_run(run: str, output: Path) -> RunFolder:
    """Return the folder of a run that is named by its path, or by its name under ``output``. Raises: UserError."""
    for path in (Path(run), output / run):
        if (path / "config.yaml").exists():
            return RunFolder(path.resolve())
    known = [path.parent.name for path in output.glob("*/config.yaml")]
    raise UserError(f"no config.yaml in {run} or {output / run}: name the folder of a run{suggestion(run, known)}")


def saved_config(folder: RunFolder, overrides: list[str]) -> TrainConfig:
    """Return the configuration of a run, checked. Raises: UserError, also where an override would change results."""
    for override in overrides:
        key, equals, _ = override.partition("=")
        if key in GROUP_KEYS:
            raise UserError(f"a rerun sets single keys, got '{override}': name one of them, {key}.KEY=VALUE")
        if not equals or not is_neutral(key):
            allowed = ", ".join(sorted(NEUTRAL))
            raise UserError(f"a rerun takes {allowed}, got '{override}': for another run use experiments.train")
    with as_user_error(OmegaConfBaseException, YAMLError, OSError, RecursionError, before=f"{folder.config_path}: "):
        saved = OmegaConf.load(folder.config_path)
        if "${" in OmegaConf.to_yaml(saved):  # a folder from elsewhere may name a variable of this machine
            raise ValueError("it holds ${...}, which no run writes")
        composed = OmegaConf.merge(saved, OmegaConf.from_dotlist(overrides))
        if not isinstance(composed, DictConfig):
            raise ValueError("it is not a configuration")
        return typed(composed)


def free_folder(path: Path) -> RunFolder:
    """Return the first of ``NAME-rerun-1``, ``-2`` ... that is not finished and not in use."""
    numbered = (RunFolder(path.with_name(f"{path.name}-rerun-{number}")) for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.is_done() and not folder.is_locked())


def compare_weights(original: RunFolder, again: RunFolder) -> str:
    """Return a sentence that says whether two finished runs ended with the same weights."""
    first, second = (load_json(folder.done_path).get("weights_sha256") for folder in (original, again))
    if problem := status_of(original).problem:
        return f"{original.path.name} is damaged, its weights are not compared: {problem}"
    if first is None:
        return f"{original.path.name} is not finished: no weights to compare"
    same = "the same weights as" if first == second else "other weights than"
    return f"ended with {same} {original.path.name}"
