"""A finished run is extended to more epochs: it ends as a run that had them from the start, or is refused."""

import json
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.runs import manifest
from experiments.runs.checkpoints import published
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, state_of
from experiments.training.extending import copy_end, end_to_extend
from experiments.training.run import execute
from tests.crashes import Crash, crash_at
from tests.refusals import refused
from tests.tools.simulated_runs import configured

WORDS = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=80", "batch_size=4", "cluster.num_threads=1"]
STEPS = [*WORDS, "sparsifier=exdyna", "lr_milestones=[1,3]", "optimizer=sgd"]
LETTERS = ["model=lstm_small", "model.settings.hidden=8", "dataset=manuals", "dataset.settings.num_train=800"]
CASES = {
    "milestones": STEPS,
    "density warm-up": [*STEPS, "density_warmup.steps=15"],
    "rounds": [
        *WORDS,
        "sparsifier=micro",
        "rounds.every=5",
        "rounds.momentum=0.5",
        "rounds.momentum_with_feedback=true",
    ],
    "text": [*LETTERS, "dataset.settings.num_test=100", "batch_size=4", "dataset.sequence_length=10", "accumulate=2"],
    "flat cosine": [*WORDS, "lr_shape=cosine", "lr_end=1.0", "sparsifier=topk"],
}
KEPT = "checkpoint.at_end=true"


@pytest.fixture(autouse=True)
def _without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "git_state", lambda folder: {"commit": "x"})  # git is slow


def finished(config: TrainConfig) -> RunFolder:
    execute(config)
    return folder_of(config)


def result(folder: RunFolder) -> tuple[str, list[dict[str, object]]]:
    """Return what a run computed and recorded, without its times."""
    rows = [*read_records(folder.steps_path), *read_records(folder.epochs_path)]
    untimed = [{key: row[key] for key in row if not key.endswith(("_s", "words_per_s"))} for row in rows]
    return json.loads(folder.done_path.read_text())["weights_sha256"], untimed


@pytest.mark.parametrize("case", CASES)
def test_an_extended_run_ends_as_one_that_had_all_epochs_from_the_start(tmp_path: Path, case: str) -> None:
    words = CASES[case]
    whole = finished(configured(tmp_path / "whole", *words, "epochs=4", world_size=2))
    for epochs in (2, 3, 4):  # one that was extended is extended again
        more = ["resume=extend"] if epochs > 2 else []
        config = configured(tmp_path / "runs", *words, f"epochs={epochs}", KEPT, *more, world_size=2)
        folder = finished(config)
    assert folder.path.name == whole.path.name
    assert result(folder) == result(whole)
    last = json.loads(folder.manifest_path.read_text())
    assert 0 < last["began_at_step"] == last["steps"] - json.loads(folder.done_path.read_text())["step"] // 4
    assert [code["commit"] for code in last["earlier_git"]] == ["x", "x"]  # of both shorter runs
    assert len(published(folder)) == 1
    assert not execute(config)


def test_a_kill_while_the_end_is_copied_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*STEPS, "dataset.settings.num_samples=24", KEPT]
    finished(configured(tmp_path / "runs", *words, "epochs=1", world_size=2))
    whole = result(finished(configured(tmp_path / "whole", *words, "epochs=2", world_size=2)))
    longer = configured(tmp_path / "runs", *words, "epochs=2", "resume=extend", world_size=2)
    for moment in count(step=2):
        killed = replace(longer, output=str(tmp_path / str(moment)))
        shutil.copytree(tmp_path / "runs", killed.output)
        folder, end = folder_of(killed), end_to_extend(killed)
        assert end
        try:
            with folder.claim(), crash_at(moment, monkeypatch):
                copy_end(end, folder)
            break
        except Crash:
            execute(killed)
        assert result(folder) == whole, moment
        assert state_of(folder) == State.DONE, moment
        assert len(published(folder)) == 1, moment
    assert moment > 5


@pytest.mark.parametrize(
    ("words", "more", "reasons"),
    [
        ([], [], ("checkpoint.at_end=true", "rerun")),
        ([KEPT, "lr_shape=cosine", "lr_warmup_epochs=0.5"], [], ("lr_shape=cosine", "epochs")),
        ([KEPT, "rounds.every=4"], [], ("rounds.every=4",)),
        ([KEPT, "rounds.every=5", "rounds.delay=2"], [], ("rounds.every=5",)),
        ([KEPT], ["lr=0.3"], ("no finished run",)),
    ],
)
def test_a_run_that_would_end_otherwise_is_not_extended(
    tmp_path: Path, words: list[str], more: list[str], reasons: tuple[str, ...]
) -> None:
    execute(configured(tmp_path, *WORDS, "sparsifier=micro", *words, "epochs=1", world_size=2))
    longer = [*WORDS, "sparsifier=micro", *words, "epochs=2", *more, "resume=extend"]
    refused(lambda: configured(tmp_path, *longer, world_size=2), *reasons, "resume=extend", error=UserError)
    assert len(list(tmp_path.glob("*/DONE"))) == 1


def test_the_rerun_that_kept_its_end_is_extended_in_place_of_the_run_that_did_not(tmp_path: Path) -> None:
    words = [*WORDS, "sparsifier=micro"]
    before = finished(configured(tmp_path / "runs", *words, "epochs=1", world_size=2)).path
    kept = finished(configured(tmp_path / "kept", *words, "epochs=1", KEPT, world_size=2)).path
    for name in ("-rerun-1", "-a"):  # whichever a listing of the folder has first
        shutil.copytree(kept, before.with_name(f"{before.name}{name}"))
        end = end_to_extend(configured(tmp_path / "runs", *words, "epochs=2", "resume=extend", world_size=2))
        assert end
        assert before.name in str(end.path)
        assert end.path.exists()


def test_a_run_starts_from_a_finished_one_that_kept_its_end(tmp_path: Path) -> None:
    words = [*WORDS, "sparsifier=micro", "lr=0.1"]
    before = finished(configured(tmp_path, *words, "epochs=1", KEPT, world_size=2))
    after = finished(configured(tmp_path, *words, "epochs=2", "lr=0.01", f"start_from={before.path}", world_size=2))
    assert [row["step"] for row in read_records(after.steps_path)] == list(range(10, 20))
