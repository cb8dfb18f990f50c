"""Run folders and studies of tests: mark a folder as a finished run, what a run ended with, the file of a study."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.runs.files import digest_of, load_json
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import write_done


def finished(folder: RunFolder) -> RunFolder:
    """Write DONE for what is in a folder; files that a finished run needs are made where they are missing."""
    for path in (folder.config_path, folder.manifest_path, folder.steps_path, folder.epochs_path):
        if not path.exists():
            path.write_text("{}" if path.suffix == ".json" else "")
    summary = {key: value for key, value in load_json(folder.done_path).items() if key != "sha256"}
    write_done(folder, summary, {path.name: digest_of(path) for path in (folder.steps_path, folder.epochs_path)})
    return folder


def only_run(output: Path) -> Path:
    """Return the only folder in a folder of runs."""
    (folder,) = [path for path in output.iterdir() if path.is_dir()]
    return folder


def weights_of(output: Path) -> str:
    """Return the digest of the weights that the only run in a folder has ended with."""
    return str(load_json(only_run(output) / "DONE")["weights_sha256"])


def write_study(folder: Path, words: Sequence[str], grid: dict[str, Any]) -> str:
    """Write a study; return its file, as a command takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "study.yaml"
    path.write_text(json.dumps({"overrides": [*words], "grid": grid}))
    return str(path)
