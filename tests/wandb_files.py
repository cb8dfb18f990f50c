"""Runs as the files of W&B have them, ``run-ID.wandb``: what a mirror has written is read back as from its server."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError
from experiments.reports.frames import Frames
from experiments.reports.run_configs import Selection
from experiments.tracking.sources import REMEDY, Mirrored, frames_of, name_of


def read_files(root: Path, selection: Selection | None = None) -> Frames:
    """Read the finished runs whose files are anywhere under ``root``."""
    return frames_of(in_files(str(root)), str(root), selection)


def in_files(root: str) -> list[Mirrored]:
    """Read the files of W&B, ``run-ID.wandb``, anywhere under ``root``; of several of a run the newest comes last."""
    paths = sorted({path.resolve() for path in Path(root).rglob("*.wandb")}, key=lambda path: path.parent.name)
    if not paths:
        raise UserError(f"{root} holds no file of W&B (*.wandb): name a folder of runs made with tracking=wandb")
    return list(map(read_file, paths))


def read_file(path: Path) -> Mirrored:
    """Read one file by wandb's own reader, which prints its records as lines of JSON."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise UserError(f"cannot read {path}: {reason}; {REMEDY}")
    found: dict[str, list[Any]] = {}
    for record in map(json.loads, done.stdout.splitlines()):
        found.setdefault(record["type"], []).append(record.get(record["type"]) or {})
    run = (found.get("run") or [{}])[-1]
    mirrored = (run.get("config") or {}).get("update") or {}
    return Mirrored(
        name=name_of(mirrored, run.get("run_id") or path.stem),
        where=str(path),
        is_finished="exit" in found and not found["exit"][-1].get("exit_code"),
        mirrored=mirrored,
        history=lambda: [each["item"] for each in found.get("history", ())],
    )
