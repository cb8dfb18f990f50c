"""A mirror of a run at Weights & Biases, made from the run's folder alone.

A process of its own reads the records as they grow, so that the run never waits for W&B and never ends because of it.
The folder stays the truth: the mirror can be made again from it at any time.
"""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from experiments.config.errors import UserError, one_line, one_line_with_type
from experiments.config.tracking_settings import TrackingConfig
from experiments.launching.child_environment import child_environment
from experiments.runs.json_lines import Row
from experiments.runs.run_folder import RunFolder

RECORDS = ("steps", "epochs")
_POLL_S = 1.0
_STOPPED_S = 5.0  # a run that was stopped waits no longer: going on makes the mirror anew


def check_wandb(tracking: TrackingConfig) -> None:
    """Raise UserError where the mirror that ``tracking`` describes cannot be made on this machine."""
    if tracking.name == "none":
        return
    need_wandb("tracking=wandb")
    if tracking.mode == "online":
        need_key("tracking.mode=online", "use tracking.mode=offline")


def need_wandb(asked: str) -> None:
    """Raise UserError where the package wandb is not installed."""
    if find_spec("wandb") is None:
        raise UserError(f"{asked} needs the package wandb, which is not installed: pip install wandb")


def need_key(asked: str, otherwise: str) -> None:
    """Raise UserError where no key of W&B is known here, instead of the question that wandb would ask."""
    import wandb

    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            found = wandb.login(prompt=False)
    except Exception as error:  # of any kind: a key that cannot be one, settings that cannot be read
        raise UserError(f"{asked}: {one_line(error)}; set WANDB_API_KEY, or {otherwise}") from None
    if not found:
        raise UserError(f"{asked} needs a key of W&B, and there is none: set WANDB_API_KEY, or {otherwise}")


@contextmanager
def mirrored(tracking: TrackingConfig, folder: RunFolder) -> Iterator[None]:
    """Mirror the run that writes into ``folder`` while the context lasts; what goes wrong is one warning at its end."""
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
        wrong = _end(process, tracking.finish_s if folder.is_done() else min(tracking.finish_s, _STOPPED_S))
        if wrong:
            _warn(wrong if process.returncode < 0 else _last_line(_log_path(folder)) or wrong, folder)


def mirror(folder: RunFolder, tracking: TrackingConfig, wait: Callable[[], bool] = lambda: True) -> str:
    """Mirror a run from its first row on, until it is over.

    Args:
        folder: of a run; its ranks may not have begun yet.
        wait: lets a moment pass; returns whether the run is over, so that the rows to be read next are its last.

    Returns:
        Where the mirror is: a folder, or an address; empty where the run never began.
    """
    is_over = False
    while not folder.manifest_path.exists():
        if is_over:
            return ""
        is_over = wait()
    where = None
    while where is None:
        where = _mirror_attempt(folder, tracking, wait)
    return where


def group_of(name: str) -> str:
    """Return what the runs of one experiment have in common in their names: all but seed and hash."""
    return re.sub(r"-s\d+-[0-9a-f]{8}$", "", name)


def _mirror_attempt(folder: RunFolder, tracking: TrackingConfig, wait: Callable[[], bool]) -> str | None:
    """Mirror the run until it is over, or until its ranks are started anew, from an earlier step.

    The manifest is written after the records are taken back to a checkpoint, and before rows are added: rows that were
    read while it stayed the same are rows of its attempt.

    Returns:
        Where the mirror is; None where the ranks were started anew.
    """
    began = _beginning(folder)
    run = _begin(folder, tracking)
    tails = {kind: _Tail(folder.path / f"{kind}.jsonl") for kind in RECORDS}
    is_over = is_whole = False
    try:
        while not is_over:
            is_over = wait()
            rows = {kind: tails[kind].read() for kind in reversed(RECORDS)}  # an epoch's row comes after its steps'
            if _beginning(folder) != began:
                return None
            _log(run, rows)
        if folder.is_done():
            run.summary["done"] = json.loads(folder.done_path.read_text())
            is_whole = True
    finally:
        run.finish(exit_code=0 if is_whole else 1)
    return run.url if tracking.mode == "online" else str(Path(run.dir).parent)


def _begin(folder: RunFolder, tracking: TrackingConfig) -> Any:
    import wandb

    name = folder.path.name
    for earlier in (folder.path / "wandb").glob(f"*run-*-{name}"):
        shutil.rmtree(earlier, ignore_errors=True)  # resumed or made again: one mirror, without rows twice
    manifest = json.loads(folder.manifest_path.read_text())
    config = yaml.safe_load(folder.config_path.read_text())
    run = wandb.init(
        id=name,  # an id that the server knows starts over there
        name=name,
        project=tracking.project,
        entity=tracking.entity,
        group=group_of(name),
        job_type="train",
        tags=list(tracking.tags),
        dir=str(folder.path),
        mode=cast(Literal["offline", "online"], tracking.mode),
        config={**config, "manifest": manifest},
        settings=_settings(wandb),
    )
    for kind in RECORDS:
        run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
    return run


def _settings(wandb: Any) -> Any:
    """What W&B would find out about this process says nothing about the run; the manifest does."""
    return wandb.Settings(
        console="off",
        silent=True,
        init_timeout=30,
        save_code=False,
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )


def _log(run: Any, rows: dict[str, list[Row]]) -> None:
    """Log new rows in the order of training; the number of steps done when a row was written tells it."""
    new = [(kind, row) for kind in RECORDS for row in rows[kind]]
    for kind, row in sorted(new, key=lambda item: item[1]["step"] + (item[0] == "steps")):  # stable: steps first
        run.log({f"{kind}/{key}": value for key, value in row.items()})


class _Tail:
    """The rows that a file of records got since the last look; a row that is still being written comes later."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[Row]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _beginning(folder: RunFolder) -> tuple[int, int] | None:
    """Return what changes when the ranks begin once more."""
    try:
        status = folder.manifest_path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _start(folder: RunFolder) -> "subprocess.Popen[bytes]":
    path = _log_path(folder)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.tracking.wandb_mirror", str(folder.path.resolve())],
            stdin=subprocess.PIPE,  # what comes through it, its end included, says that the run is over
            stdout=log,
            stderr=log,
            env=child_environment(WANDB_ERROR_REPORTING="false"),
            start_new_session=True,  # no terminal to ask at, and no Ctrl-C before the run has dealt with it
        )


def _end(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Tell the mirror that the run is over and wait for it; return what went wrong, or nothing."""
    assert process.stdin is not None
    with suppress(OSError):  # it may be gone
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


def _log_path(folder: RunFolder) -> Path:
    return folder.path / "wandb" / "mirror.log"


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")
    return ""


def _warn(wrong: str, folder: RunFolder) -> None:
    again = f"make it again with: python -m experiments.track {folder.path}"
    print(f"warning: W&B mirror: {wrong}; the run is whole, {again}", file=sys.stderr)


def _moment() -> bool:
    """Wait until the run is over, but not for long; return whether it is."""
    return bool(select.select([sys.stdin], [], [], _POLL_S)[0])


def main(run_dir: str) -> int:
    """Mirror the run of a folder while standard input stays open; the last line written says what went wrong."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, whose end is the mirror's
    try:
        folder = RunFolder(Path(run_dir))
        asked = yaml.safe_load(folder.config_path.read_text())["tracking"]
        mirror(folder, TrackingConfig(**asked), _moment)
    except Exception as error:
        traceback.print_exc()
        print(one_line_with_type(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
