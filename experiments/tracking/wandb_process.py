"""The process that mirrors a run at W&B while it runs.

``python -m experiments.tracking.wandb_process RUN_FOLDER`` mirrors until its standard input has something to read, or
is closed. It is a separate process, so that W&B can neither delay the run nor make it fail.
"""

import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from experiments.config.errors import one_line, one_line_with_type
from experiments.config.tracking_settings import TrackingConfig
from experiments.launching.child_environment import child_environment
from experiments.runs.run_folder import RunFolder
from experiments.tracking.wandb_mirror import mirror

_POLL_S = 1.0
_STOPPED_S = 5.0  # how long a stopped run waits for its mirror, which is made again when the run is resumed


@contextmanager
def mirrored(tracking: TrackingConfig, folder: RunFolder) -> Iterator[None]:
    """Mirror the run that writes into ``folder`` while the context lasts; a failure prints one warning at the end."""
    if tracking.name == "none":
        yield
        return
    try:
        process = _start(folder)
    except OSError as error:
        _warn(one_line(error), folder)
        yield
        return
    try:
        yield
    finally:
        problem = _end(process, tracking.finish_s if folder.is_done() else min(tracking.finish_s, _STOPPED_S))
        if problem:
            _warn(problem if process.returncode < 0 else _last_line(_log_path(folder)) or problem, folder)


def main(run_dir: str) -> int:
    """Mirror the run of a folder until it ends; after a failure the last printed line is the reason."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they stop the run; the mirror ends after the run
    try:
        folder = RunFolder(Path(run_dir))
        settings = yaml.safe_load(folder.config_path.read_text())["tracking"]
        mirror(folder, TrackingConfig(**settings), _wait)
    except Exception as error:
        traceback.print_exc()
        print(one_line_with_type(error), file=sys.stderr)
        return 1
    return 0


def _start(folder: RunFolder) -> "subprocess.Popen[bytes]":
    path = _log_path(folder)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.tracking.wandb_process", str(folder.path.resolve())],
            stdin=subprocess.PIPE,  # a line, or the end of the input, means that the run has ended
            stdout=log,
            stderr=log,
            env=child_environment(WANDB_ERROR_REPORTING="false"),
            start_new_session=True,  # wandb cannot prompt, and Ctrl-C reaches the run alone
        )


def _end(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Make the process finish the mirror and wait for it; return the failure, empty after a success."""
    assert process.stdin is not None
    with suppress(OSError):  # it may have died
        process.stdin.write(b"\n")
        process.stdin.close()
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"it was not complete after {seconds:g} s"
    finally:
        if process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _wait() -> bool:
    """Wait at most ``_POLL_S`` for the end of the run; return whether it has ended."""
    return bool(select.select([sys.stdin], [], [], _POLL_S)[0])


def _log_path(folder: RunFolder) -> Path:
    return folder.path / "wandb" / "mirror.log"


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")
    return ""


def _warn(problem: str, folder: RunFolder) -> None:
    again = f"make it again with: python -m experiments.track {folder.path}"
    print(f"warning: W&B mirror: {problem}; its records are complete, {again}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
