"""Run again what a run folder says, in a place of its own."""

import itertools
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config.checks import typed
from experiments.config.errors import UserError, one_line, suggestion
from experiments.config.identity import NEUTRAL, is_neutral
from experiments.config.repository import ROOT
from experiments.config.schema import TrainConfig
from experiments.runs.atomic_files import load_json
from experiments.runs.manifest import git_state
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import log_of
from experiments.sweeps.local_sweep import FailedRun, Outcome, saving_at_interrupt
from experiments.sweeps.local_sweep_worker import attempt
from experiments.training.preflight import check_run
from experiments.training.runner import show_progress


def rerun(run: str, words: list[str], *, output: Path) -> tuple[RunFolder, Outcome]:
    """Run exactly the configuration of a run again, in ``NAME-rerun-K`` beside it; the run itself is only read.

    A rerun that was broken off goes on.

    Args:
        run: The run's folder, or its name under ``output``.
        words: KEY=VALUE of what says where, not what: the root of the data, another output.

    Raises:
        UserError: no such run, a configuration that this code does not know, or a word that would change the run.
    """
    original = find_run(run, output)
    config = saved_config(original, words)
    check_run(config)
    parent = Path(config.output) if _sets(words, "output") else original.path.parent
    config.output = str(parent)
    for line in differences(original):
        print(f"warning: {line}", file=sys.stderr)
    folder = free_folder(parent / original.path.name)
    outcome = Outcome()
    with saving_at_interrupt() as interrupted:
        try:
            why = attempt(config, folder, show_progress)
        except SystemExit:
            if not interrupted():
                raise
            why = None
            outcome.stopped = 128 + signal.SIGINT
    if why:
        outcome.failures.append(FailedRun(folder.path.name, why, log_of(folder)))
    return folder, outcome


def find_run(run: str, output: Path) -> RunFolder:
    """Return the folder of a run that is named by its path, or by its name under ``output``.

    Raises:
        UserError: neither is the folder of a run.
    """
    for path in (Path(run), output / run):
        if (path / "config.yaml").exists():
            return RunFolder(path.resolve())
    known = [path.parent.name for path in output.glob("*/config.yaml")]
    raise UserError(f"no config.yaml in {run} or {output / run}: name the folder of a run{suggestion(run, known)}")


def saved_config(folder: RunFolder, words: list[str]) -> TrainConfig:
    """Return the configuration of a run with ``words``, checked.

    Raises:
        UserError: the file is no configuration of this version, or a word would change the run.
    """
    for word in words:
        key = word.partition("=")[0]
        if "=" not in word or not is_neutral(key):
            allowed = ", ".join(sorted(NEUTRAL))
            raise UserError(f"a rerun takes {allowed}, got '{word}': for another run use experiments.train")
    try:
        composed = OmegaConf.merge(OmegaConf.load(folder.config_path), OmegaConf.from_dotlist(words))
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise UserError(f"{folder.config_path}: {one_line(error)}") from None
    if not isinstance(composed, DictConfig):
        raise UserError(f"{folder.config_path} is no configuration")
    try:
        return typed(composed)
    except UserError as error:
        raise UserError(f"{folder.config_path}: {error}") from None


def free_folder(path: Path) -> RunFolder:
    """Return the first of ``NAME-rerun-1``, ``-2`` ... that is not finished and not in use."""
    numbered = (RunFolder(path.with_name(f"{path.name}-rerun-{number}")) for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.is_done() and not folder.is_locked())


def differences(original: RunFolder) -> list[str]:
    """Say in which way the code of today is not that of the run."""
    then, now = load_json(original.manifest_path).get("git") or {}, git_state(ROOT)
    if not (then.get("revision") and now["revision"]):
        return [f"cannot compare the code: no git revision {'here' if then.get('revision') else 'in the manifest'}"]
    if then["revision"] != now["revision"]:
        return [f"the code is at git revision {now['revision'][:12]}, the run was made at {then['revision'][:12]}"]
    if then.get("diff_sha256") != now["diff_sha256"]:
        return [f"the code has other changes on top of git revision {now['revision'][:12]} than the run's had"]
    return []


def compare(original: RunFolder, again: RunFolder) -> str:
    """Say whether two finished runs ended with the same weights."""
    first, second = (load_json(folder.done_path).get("weights_sha256") for folder in (original, again))
    if first is None:
        return f"{original.path.name} is not finished: no weights to compare"
    same = "the same weights as" if first == second else "other weights than"
    return f"ended with {same} {original.path.name}"


def _sets(words: list[str], key: str) -> bool:
    return any(word.startswith(f"{key}=") for word in words)
