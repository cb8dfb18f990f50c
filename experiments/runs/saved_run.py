"""Find the folder of a run, read its configuration again, and compare its code and weights with those of another."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from experiments.config.compose import typed
from experiments.config.errors import UserError, one_line, suggestion
from experiments.config.identity import NEUTRAL, is_neutral
from experiments.config.paths import ROOT
from experiments.config.schema import TrainConfig
from experiments.runs.atomic_files import load_json
from experiments.runs.git_state import git_state
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import status_of


def find_run(run: str, output: Path) -> RunFolder:
    """Return the folder of a run that is named by its path, or by its name under ``output``.

    Raises:
        UserError: neither path is the folder of a run.
    """
    for path in (Path(run), output / run):
        if (path / "config.yaml").exists():
            return RunFolder(path.resolve())
    known = [path.parent.name for path in output.glob("*/config.yaml")]
    raise UserError(f"no config.yaml in {run} or {output / run}: name the folder of a run{suggestion(run, known)}")


def saved_config(folder: RunFolder, overrides: list[str]) -> TrainConfig:
    """Return the configuration of a run with ``overrides``, checked.

    Raises:
        UserError: this version cannot read the configuration, or an override would change the result.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if "=" not in override or not is_neutral(key):
            allowed = ", ".join(sorted(NEUTRAL))
            raise UserError(f"a rerun takes {allowed}, got '{override}': for another run use experiments.train")
    try:
        saved = OmegaConf.load(folder.config_path)
        _refuse_interpolations(saved)
        composed = OmegaConf.merge(saved, OmegaConf.from_dotlist(overrides))
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{folder.config_path}: {one_line(error)}") from None
    if not isinstance(composed, DictConfig):
        raise UserError(f"{folder.config_path} is not a configuration")
    try:
        return typed(composed)
    except UserError as error:
        raise UserError(f"{folder.config_path}: {error}") from None


def _refuse_interpolations(saved: Any) -> None:
    """Refuse ``${...}``: no run writes it, and in a folder from elsewhere it may ask for a variable of this machine."""
    text = OmegaConf.to_yaml(saved)
    if "${" in text:
        raise YAMLError("it holds ${...}, which no run writes")


def other_code(finished: Sequence[RunFolder]) -> list[str]:
    """Return a line if some finished runs were made by other code than the present one."""
    known = [(state["revision"], state.get("diff_sha256")) for state in map(_code_of, finished) if state]
    now = git_state(ROOT) if known else {"revision": None}
    others = Counter(each for each in known if each != (now["revision"], now.get("diff_sha256")))
    if not others or now["revision"] is None:
        return []
    made = ", ".join(f"{_code_name(*code)} ({number})" for code, number in others.most_common())
    here = _code_name(now["revision"], now["diff_sha256"])
    return [
        f"{sum(others.values())} of {len(finished)} finished runs are of other code: {made}; the code here is {here}"
    ]


def _code_of(folder: RunFolder) -> dict[str, Any]:
    """Return the code of a run, as ``git_state`` has it; empty where its manifest has no revision."""
    git = load_json(folder.manifest_path).get("git")
    if not isinstance(git, dict) or not git.get("revision"):
        return {}
    return git if all(isinstance(git.get(key), str | None) for key in ("revision", "diff_sha256")) else {}


def _code_name(revision: str, changes: str | None) -> str:
    return f"{revision[:8]}{f' with changes {changes[:6]}' if changes else ''}"


def compare_weights(original: RunFolder, again: RunFolder) -> str:
    """Return a sentence that says whether two finished runs ended with the same weights."""
    first, second = (load_json(folder.done_path).get("weights_sha256") for folder in (original, again))
    if problem := status_of(original).problem:
        return f"{original.path.name} is damaged, its weights are not compared: {problem}"
    if first is None:
        return f"{original.path.name} is not finished: no weights to compare"
    same = "the same weights as" if first == second else "other weights than"
    return f"ended with {same} {original.path.name}"
