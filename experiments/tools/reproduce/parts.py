"""Run the parts of a paper in order, each in its own process; unchanged parts are skipped.

A part with trainings is finished when all of its runs are. Other parts leave a stamp: command, code, checksum of the
files that it reads, and the files that it wrote.
"""

import functools
import hashlib
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.config import ROOT
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.config.stopping import Stopped, handled, raise_stop
from experiments.runs.files import load_json, write_json
from experiments.runs.manifest import git_state
from experiments.runs.run_folder import folder_of
from experiments.runs.status import State, state_of
from experiments.sweeps.study import jobs_of
from experiments.tools.reproduce.papers import Paper, Part, value_of
from experiments.training.preflight import prepare_runs

STAMPS = "parts"  # the folder of stamps


def check(paper: Paper) -> None:
    """Check all commands, and all runs of studies whose files exist, before the first part starts.

    Raises:
        UserError: a command that would not be understood, or a run that could not start.
    """
    for part in paper.parts:
        if not part.trains:
            check_command(part)
        elif not _waits_for_files(part):
            runs_of(part)


def check_command(part: Part) -> None:
    """Parse a part's command as its entry point does, and check its options if its files exist.

    Raises:
        UserError: as the command does.
    """
    if _waits_for_files(part):
        return
    module = importlib.import_module(f"experiments.{part.words[0]}")
    try:
        options = module.parser().parse_args(part.words[1:])
        getattr(module, "check_options", lambda _: None)(options)
    except UserError as error:
        raise UserError(f"part {part.name}: {error}") from None


@functools.cache
def runs_of(part: Part) -> list[TrainConfig]:
    """Return the checked runs of a part that trains. Raises: UserError as a sweep does."""
    return prepare_runs(jobs_of(part.words[1], list(part.words[2:])))


def reproduce(paper: Paper, out: Path) -> Part | None:
    """Run the unfinished parts in order and print what each left; return the part that failed, if one did."""
    for number, part in enumerate(paper.parts, 1):
        head = f"[{number}/{len(paper.parts)}] {part.name}"
        if _is_done(part, out):
            print(f"{head}: unchanged, nothing to do", flush=True)
            continue
        print(f"{head}: {part.command}", flush=True)
        began = time.perf_counter()
        exit_code = run(part)
        seconds = time.perf_counter() - began
        if exit_code:
            print(f"{head}: failed after {seconds:.0f} s, exit code {exit_code}", flush=True)
            return part
        files = sorted(str(path.relative_to(part.folder)) for path in part.folder.rglob("*") if path.is_file())
        stamp = _stamp(part, out)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        write_json(stamp, _made_of(part) | {"seconds": round(seconds, 1), "files": files})
        left = f"{len(runs_of(part))} runs" if part.trains else f"{len(files)} files in {part.folder}"
        print(f"{head}: {seconds:.0f} s, {left}", flush=True)
    return None


def run(part: Part) -> int:
    """Run a part's command in a new process and return its exit code; SIGTERM and SIGUSR1 are passed on."""
    process = subprocess.Popen([sys.executable, *part.arguments])
    try:
        with handled(raise_stop):
            return process.wait()
    except (Stopped, KeyboardInterrupt) as stop:
        if isinstance(stop, Stopped):  # Ctrl-C has reached the process, too
            process.send_signal(stop.number)
        process.wait()  # while it saves its state
        raise


def seconds_of(part: Part, out: Path) -> float | None:
    """Return the duration of a part's last run; None if it is not known."""
    try:
        return float(load_json(_stamp(part, out))["seconds"])
    except (ValueError, KeyError, TypeError):
        return None


def _waits_for_files(part: Part) -> bool:
    """Return whether a command names a file that an earlier part makes."""
    out, own = part.folder.parent, part.folder
    named = [Path(value_of(word)) for word in part.words if word.startswith("schedule.")]
    files = [Path(word) for word in part.words if word.endswith(".json")]
    named += [path for path in files if path.is_relative_to(out) and not path.is_relative_to(own)]
    return any(not path.exists() for path in named)


def _is_done(part: Part, out: Path) -> bool:
    if part.trains:
        runs = [folder_of(run) for run in runs_of(part)]
        return not _waits_for_files(part) and all(state_of(folder) == State.DONE for folder in runs)
    stamp = load_json(_stamp(part, out))
    is_whole = all((part.folder / name).exists() for name in stamp.get("files", ()))
    return is_whole and stamp.items() >= _made_of(part).items()


def _made_of(part: Part) -> dict[str, Any]:
    """Return a part's command, the code and checksums of its input files; for runs, of their DONE files."""
    digest = hashlib.sha256()
    named = [Path(word) for word in ([] if part.trains else part.words[1:])]
    for path in (path for path in named if path.exists() and not path.is_relative_to(part.folder)):
        for file in [path] if path.is_file() else sorted(path.glob("*/DONE")):
            digest.update(file.name.encode() + file.parent.name.encode() + file.read_bytes())
    return {"command": part.command, "code": git_state(ROOT), "inputs": digest.hexdigest()}


def _stamp(part: Part, out: Path) -> Path:
    return out / STAMPS / f"{part.name}.json"
