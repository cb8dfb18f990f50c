"""Judge an attempt and the end of a case: what is wrong is a list of lines, empty if all is as it must be."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError
from experiments.config.stopping import STOP_SIGNALS, exit_code
from experiments.runs.atomic_files import load_json
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder
from tests.soak.attempt import Ended
from tests.soak.case import Fault, Setup
from tests.soak.damage import run_folders

MAX_LINES = 6  # that a command prints on standard error, beside its progress
_SAVED = {exit_code(number) for number in STOP_SIGNALS}
_STOPPED = _SAVED | {128 + signal.SIGHUP, 128 + signal.SIGQUIT}
_TOLD = ("stopped by ", "left without saving")
_USUAL = re.compile(
    r"step \d+/\d+(, |$)|^resumed from step |^checkpoint not used: |^stopped by |^left without saving,|^\s*$"
)
_DRAFTS = (".*.tmp", ".draft-*", ".old-*")


@dataclass(frozen=True)
class Outcome:
    """What a finished run left: its weights, and its records without the times."""

    weights: str
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]


def outcome_of(output: Path) -> Outcome | None:
    """Return the outcome of the only run below ``output``; None if it has not finished or cannot be read."""
    folders = run_folders(output)
    if len(folders) != 1:
        return None
    folder = RunFolder(folders[0])
    try:
        steps, epochs = read_records(folder.steps_path), read_records(folder.epochs_path)
    except UserError:
        steps, epochs = [], []
    weights = load_json(folder.done_path).get("weights_sha256")
    return Outcome(weights, _timeless(steps), _timeless(epochs)) if weights else None


def is_done(output: Path) -> bool:
    """Return whether the run below ``output`` is marked as finished."""
    return any(RunFolder(path).done_path.exists() for path in run_folders(output))


def problems_of_attempt(ended: Ended, setup: Setup, output: Path, *, torn: bool) -> list[str]:
    """Return what is wrong with an attempt, whose run folder may have been torn before."""
    if ended.hung:
        return ["it did not end: see the stacks of its processes"]
    found = [f"left behind: {process}" for process in ended.left]
    killed = any(fault.signal not in (0, *STOP_SIGNALS) for fault in ended.fired)
    if ended.temporary and not killed:
        found.append(f"temporary files left: {', '.join(ended.temporary)}")
    if setup.kind != "torchrun":  # which prints what it likes
        for number, (code, errors) in enumerate(zip(ended.codes, ended.errors, strict=True)):
            found += [
                f"command {number}: {line}" for line in _problems_of_command(code, errors, ended.fired, setup.kind)
            ]
    if not any(ended.codes) and not is_done(output):
        found.append("exit code 0 without DONE")
    if any(ended.codes) and not ended.fired and not torn:
        found.append(f"exit code {_codes(ended)} without a fault: {error_lines(ended)[-1:] or ['no error line']}")
    return found + _wrong_blame(ended, setup)


def problems_of_end(output: Path, expected: Outcome) -> list[str]:
    """Return in what the end of a disturbed run differs from that of the undisturbed one, and what it left."""
    outcome = outcome_of(output)
    if outcome is None:
        return ["it has not finished"]
    found = [] if outcome.weights == expected.weights else ["its weights differ"]
    for name in ("steps", "epochs"):
        found += _problems_of_records(name, getattr(outcome, name), getattr(expected, name))
    (folder,) = run_folders(output)
    drafts = [path for pattern in _DRAFTS for path in folder.rglob(pattern)]
    found += [f"left behind: {path.relative_to(folder)}" for path in drafts]
    return found + (["it is locked"] if RunFolder(folder).is_locked() else [])


def error_lines(ended: Ended) -> list[str]:
    """Return the lines of errors that the commands printed."""
    return [line for errors in ended.errors for line in errors.splitlines() if line.startswith("error:")]


def _problems_of_command(code: int, errors: str, fired: Sequence[Fault], kind: str) -> list[str]:
    """Return what is wrong with a command; a signal may come before the program of a started one has begun."""
    lines = [line for line in errors.splitlines() if not _USUAL.search(line)]
    found = []
    if any(line.startswith("Traceback") for line in lines):
        found.append(f"a traceback: {lines[-1]}")
    elif len(lines) > MAX_LINES:
        found.append(f"{len(lines)} lines on standard error: {lines[0]}")
    if code in (1, 2) and not any(line.startswith("error:") for line in lines):
        found.append(f"exit code {code} without a line that begins with error:")
    known = {-fault.signal for fault in fired if kind == "started" or fault.signal not in STOP_SIGNALS}
    if code not in known | _STOPPED | {0, 1, 2}:
        found.append(f"exit code {code}")
    if code in _SAVED and not any(line.startswith(_TOLD) for line in errors.splitlines()):
        found.append(f"exit code {code}, and not a word of what is saved")
    if code in (1, 2) and [fault.kind for fault in fired] == ["full"] and "free space" not in errors:
        found.append(f"a full disk, and not a word of free space: {lines[-1:]}")
    return found


def _wrong_blame(ended: Ended, setup: Setup) -> list[str]:
    """Return whether a rank was killed or frozen, nothing else happened, and the error names something else."""
    if setup.kind not in ("local", "hosts") or len(ended.fired) != 1 or ended.gave_up or not any(ended.codes):
        return []
    (fault,) = ended.fired
    if fault.kind == "freeze":
        cause = f"rank {fault.target[4:]} failed: stood for"
    elif fault.kind == "signal" and fault.target.startswith("rank") and 1 in ended.codes:
        cause = f"rank {fault.target[4:]} failed: killed by {signal.Signals(fault.signal).name}"
    else:
        return []
    return [] if re.search(cause, "".join(ended.errors)) else [f"the error is not '{cause}': {error_lines(ended)}"]


def _problems_of_records(name: str, rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    if len(rows) != len(expected):
        return [f"{len(rows)} rows of {name}, not {len(expected)}"]
    different = [number for number, (row, other) in enumerate(zip(rows, expected, strict=True)) if row != other]
    if not different:
        return []
    row, other = rows[different[0]], expected[different[0]]
    keys = [key for key in row.keys() | other.keys() if row.get(key) != other.get(key)]
    return [f"rows of {name} differ from row {different[0]} on, in {', '.join(sorted(keys))}"]


def _codes(ended: Ended) -> str:
    return ", ".join(map(str, ended.codes))


def _timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.endswith("_s")} for row in rows]
