"""A mirror of a run at Weights & Biases, made only from the run's folder; it can be made again at any time."""

import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from experiments.config.tracking_settings import TrackingConfig
from experiments.runs.atomic_files import load_json
from experiments.runs.records import NewRows, Row
from experiments.runs.run_folder import RunFolder

RECORDS = ("steps", "epochs")


def mirror(folder: RunFolder, tracking: TrackingConfig, wait: Callable[[], bool] = lambda: True) -> str:
    """Mirror a run from its first row until it ends.

    Args:
        folder: the run folder; its ranks may not have started yet.
        wait: waits for a short time; returns whether the run has ended, so that the rows read next are its last.

    Returns:
        The folder or the address of the mirror; empty if the run never started.
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
    """Return the name of a run without seed and hash: the same for all runs of one experiment, reruns too."""
    return re.sub(r"-s\d+-[0-9a-f]{8}(-rerun-\d+)?$", "", name)


def _mirror_attempt(folder: RunFolder, tracking: TrackingConfig, wait: Callable[[], bool]) -> str | None:
    """Mirror the run until it ends, or until its ranks are started again from an earlier step.

    An earlier mirror is removed when this one stands; one that failed or was interrupted is removed itself.

    Each attempt writes the manifest after the records are rewound to a checkpoint and before rows are added. So rows
    that were read while the manifest stayed the same belong to that attempt.

    Returns:
        The folder or the address of the mirror; None if the ranks were started again.
    """
    attempt_id = _attempt_id(folder)
    run = _begin(folder, tracking)
    tails = {kind: NewRows(folder.path / f"{kind}.jsonl") for kind in RECORDS}
    own = Path(run.dir).parent
    is_over = is_complete = False
    with ExitStack() as unfinished:
        unfinished.callback(shutil.rmtree, own, ignore_errors=True)
        try:
            while not is_over:
                is_over = wait()
                rows = {
                    kind: tails[kind].read() for kind in reversed(RECORDS)
                }  # epochs first: an epoch's row is written after those of its steps
                if _attempt_id(folder) != attempt_id:
                    return None
                _log(run, rows)
            if folder.is_done():
                run.summary["done"] = load_json(folder.done_path)
                is_complete = True
        finally:
            run.finish(exit_code=0 if is_complete else 1)
        unfinished.pop_all()
    for earlier in own.parent.glob(f"*run-*-{folder.path.name}"):
        if earlier != own:  # a resumed run has one mirror, without repeated rows
            shutil.rmtree(earlier, ignore_errors=True)
    return run.url if tracking.mode == "online" else str(own)


def _begin(folder: RunFolder, tracking: TrackingConfig) -> Any:
    import wandb

    name = folder.path.name
    manifest = load_json(folder.manifest_path)
    config = yaml.safe_load(folder.config_path.read_text())
    run = wandb.init(
        id=name,  # where the server has this id, the run starts over
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
    """Return settings that keep W&B from recording this process: the manifest describes the run."""
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
    """Log new rows in the order of training: by the number of steps done when a row was written."""
    new = [(kind, row) for kind in RECORDS for row in rows[kind]]
    for kind, row in sorted(new, key=lambda item: item[1]["step"] + (item[0] == "steps")):  # stable: steps first
        run.log({f"{kind}/{key}": value for key, value in row.items()})


def _attempt_id(folder: RunFolder) -> tuple[int, int] | None:
    """Return what changes when the ranks are started again: the identity of the manifest's file."""
    try:
        status = folder.manifest_path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
