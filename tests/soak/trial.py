"""Carry out a case: the undisturbed run, then the disturbed attempts until the run has ended; say what was wrong."""

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError
from experiments.config.stopping import STOP_SIGNALS, exit_code
from experiments.runs.atomic_files import load_json
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder
from tests.small_disks import MemoryDisk, mounted
from tests.soak.attempt import Attempt, Ended
from tests.soak.case import Fault, Setup, draw_faults

_CALM_ATTEMPTS = 4  # after the last fault; more than one where an error says to start from scratch
_MAX_LINES = 6  # that a command prints on standard error, beside these
_USUAL = re.compile(r"step \d+/\d+(, |$)|^resumed from step |^checkpoint not used: |^stopped by |^note: |^\s*$")
_SAVED = {exit_code(number) for number in STOP_SIGNALS}
_CODES = _SAVED | {0, 1, 2, 128 + signal.SIGHUP, 128 + signal.SIGQUIT}
_DRAFTS = (".*.tmp", ".draft-*", ".old-*")


@dataclass
class Result:
    """What became of a case: the faults that came, a line for each attempt, and what was wrong."""

    fired: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Trial:
    """The trainings of one setup, in a folder that is made anew."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.setup, self._folder = setup, folder
        ended = self._attempt("whole", 0, None).run(())
        self._expected = outcome_of(folder / "whole")
        self._problems = [f"undisturbed: {line}" for line in problems_of(ended, setup)]
        if not self._expected:
            self._problems.append(f"the undisturbed run did not finish: {ended.errors}")

    def disturb(self, seed: int, faults: Collection[str]) -> Result:
        """Carry out the case of a seed, with these kinds of faults."""
        result = Result(problems=list(self._problems))
        if self._expected is None:
            return result
        attempts = draw_faults(seed, faults, self.setup, len(self._expected["steps"]))
        output, more = self._folder / str(seed), list[str]()
        with ExitStack() as closing:
            disk = None
            if any(fault.kind == "full" for each in attempts for fault in each) and not os.geteuid():
                disk = closing.enter_context(mounted(MemoryDisk(output, "24m")))
            for number, during in enumerate([*attempts, *[[]] * _CALM_ATTEMPTS], start=1):
                ended = self._attempt(str(seed), number, disk, *more).run([f for f in during if f.kind != "torn"])
                result.fired.update(fault.kind for fault in ended.fired)
                happened = ", ".join(map(str, ended.fired)) or "no fault"
                errors = [line for text in ended.errors for line in text.splitlines() if line.startswith("error:")]
                result.story.append("; ".join([f"{number}: {happened}; exit {ended.codes}", *errors]))
                found = problems_of(ended, self.setup)
                if any(ended.codes) and not (ended.fired or result.fired["torn"]):
                    found.append(f"exit codes {ended.codes} without a fault")
                result.problems += [f"attempt {number}: {line}" for line in found]
                more = ["resume=scratch"] if any("resume=scratch" in line for line in errors) else []
                if number > len(attempts) and not any(ended.codes):
                    break
                for fault in during:
                    if fault.kind == "torn":
                        _tear(output, fault, result)
            result.problems += problems_of_end(output, self._expected)
            if disk and result.problems:
                shutil.copytree(output, output.with_name(f"{seed}.disk"), dirs_exist_ok=True)
        for path in self._folder.glob(f"{seed}*") if not result.problems else ():
            shutil.rmtree(path, ignore_errors=True)
        return result

    def _attempt(self, name: str, number: int, disk: MemoryDisk | None, *more: str) -> Attempt:
        output = self._folder / name
        words = ["-m", "experiments.train", *self.setup.words, f"output={output}", *more]
        if self.setup.kind == "torchrun":
            agent = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
            words = [*agent, f"--nproc-per-node={self.setup.num_ranks}", *words]
        return Attempt(words, output, self._folder / f"{name}.{number}", disk)


def _tear(output: Path, fault: Fault, result: Result) -> None:
    """Change a byte of a file in the run's folder, or cut its end off, where there is one."""
    files = sorted(path for path in output.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        return
    path = files[int(fault.place[0] * len(files))]
    content = bytearray(path.read_bytes())
    at = int(fault.place[1] * len(content))
    if int(fault.place[1] * 1e6) % 2:
        content[at] ^= 1
    else:
        del content[at:]
    path.write_bytes(content)
    result.fired["torn"] += 1
    result.story.append(f"torn {path.name} at {at}")


def outcome_of(output: Path) -> dict[str, Any] | None:
    """Return the weights and the records without times of the only run in a folder; None if it has not finished."""
    folders = [RunFolder(path) for path in output.glob("*") if path.is_dir()]
    if len(folders) != 1 or not (weights := load_json(folders[0].done_path).get("weights_sha256")):
        return None
    try:
        rows = {"steps": read_records(folders[0].steps_path), "epochs": read_records(folders[0].epochs_path)}
    except UserError:
        return None
    timeless = {
        kind: [{key: value for key, value in row.items() if not key.endswith("_s")} for row in found]
        for kind, found in rows.items()
    }
    return {"weights": weights, **timeless}


def problems_of(ended: Ended, setup: Setup) -> list[str]:
    """Return what is wrong with an attempt."""
    if None in ended.codes:
        return [*ended.left, "it did not end"]
    found, killed = list(ended.left), {-fault.signal for fault in ended.fired if fault.kind == "signal"}
    for code, errors in zip(ended.codes, ended.errors, strict=True):
        lines = [line for line in errors.splitlines() if not _USUAL.search(line)]
        if setup.kind == "torchrun":  # which prints what it likes
            continue
        if any(line.startswith("Traceback") for line in lines) or len(lines) > _MAX_LINES:
            found.append(f"{len(lines)} lines on standard error: {lines[:1]} ... {lines[-1:]}")
        if code not in _CODES | killed:
            found.append(f"exit code {code}")
        if code in (1, 2) and not any(line.startswith("error:") for line in lines):
            found.append(f"exit code {code} without a line that begins with error:")
        if code in _SAVED and not re.search("^(stopped by|left without saving)", errors, re.M):
            found.append(f"exit code {code}, and not a word of what is saved")
    return found


def problems_of_end(output: Path, expected: dict[str, Any]) -> list[str]:
    """Return in what the end of a disturbed run differs from that of the undisturbed one, and what it left."""
    outcome = outcome_of(output)
    if outcome is None:
        return ["it has not finished"]
    found = [f"its {key} differ" for key, value in expected.items() if outcome[key] != value]
    found += [f"left behind: {path}" for pattern in _DRAFTS for path in output.rglob(pattern)]
    return found + [f"{path} is locked" for path in output.glob("*") if RunFolder(path).is_locked()]
