"""A run that is killed at any moment of what it writes, and started again, equals one that never was, bit for bit."""

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from experiments.runs import manifest
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, state_of
from experiments.training.run import execute
from tests.crashes import Crash, crash_at
from tests.tools.simulated_runs import configured

WORDS = [
    *("model=mlp", "dataset=synthetic", "dataset.settings.num_samples=40", "batch_size=4", "epochs=1"),
    *("sparsifier=exdyna", "checkpoint.every_steps=2", "checkpoint.keep=1", "save_weights=true"),
    "cluster.num_threads=1",
]
NUM_STEPS = 5
LEFT = {
    *("config.yaml", "command.txt", "manifest.json", "steps.jsonl", "epochs.jsonl", "weights.pt", "DONE"),
    *(".lock", "attempts", "ranks"),
}


def result(folder: RunFolder) -> dict[str, Any]:
    """What a run computed and recorded, without its times."""
    rows = [*read_records(folder.steps_path), *read_records(folder.epochs_path)]
    untimed = [{key: row[key] for key in row if not key.endswith(("_s", "words_per_s"))} for row in rows]
    return {"rows": untimed, "weights": json.loads(folder.done_path.read_text())["weights_sha256"]}


def test_a_kill_at_any_write_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "git_state", lambda folder: {})  # git is slow, and writes nothing
    config = configured(tmp_path / "whole", *WORDS, world_size=2)
    execute(config)
    whole = result(folder_of(config))
    assert [row["step"] for row in whole["rows"]] == [*range(NUM_STEPS), NUM_STEPS]
    for moment in count():
        killed = replace(config, output=str(tmp_path / str(moment)))
        folder = folder_of(killed)
        try:
            with crash_at(moment, monkeypatch):
                execute(killed)
            break
        except Crash:
            assert state_of(folder) != State.DAMAGED, moment
            execute(killed)
        assert result(folder) == whole, moment
        assert state_of(folder) == State.DONE, moment
        assert {path.name for path in folder.path.iterdir()} <= LEFT
    assert moment > 50
