"""Trainings with local steps: what ties them to those with an exchange at every step, and their records."""

from pathlib import Path

import pytest

from experiments.runs.records import read_records
from tests.tools.simulated_runs import IMAGES, Run, configured

PLAIN = ["optimizer.momentum=0", "optimizer.weight_decay=0", "lr_warmup_epochs=0"]


@pytest.mark.parametrize("method", ["dense", "topk_gather", "cltk"])
def test_rounds_of_one_step_are_training_with_the_rate_at_the_gradient(tmp_path: Path, method: str) -> None:
    words = [*IMAGES, *PLAIN, f"sparsifier={method}"]
    rounds = Run(configured(tmp_path / "rounds", *words, "rounds.every=1"))
    every_step = Run(configured(tmp_path / "gradients", *words, "optimizer.lr_at=gradient"))
    one, other = (read_records(run.folder.steps_path) for run in (rounds, every_step))
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in other], rel=1e-3)
    assert [row["bytes_sent"] for row in one] == pytest.approx([row["bytes_sent"] for row in other], rel=0.02)


def test_records_tell_rounds_from_the_steps_between(tmp_path: Path) -> None:
    run = Run(configured(tmp_path, *IMAGES, "sparsifier=topk", "rounds.every=4"))
    rows = read_records(run.folder.steps_path)
    ends = [row for row in rows if row["round"] is not None]
    assert len(rows) == 10
    assert [row["step"] for row in ends] == [3, 7, 9]  # the run's end ends a round
    for row in rows:
        assert (row["bytes_sent"] > 0) == (row["round"] is not None) == (row["density"] is not None)
    assert all(0 < row["cosine"] < 1 and row["moved_norm"] > 0 and row["update_norm"] > 0 for row in ends)
    assert run.row is not None
    assert run.row["test_loss"] > 0


@pytest.mark.parametrize(
    "words", [["sparsifier=topk", "rounds.every=4"], ["sparsifier=micro"]], ids=["rounds", "gradients"]
)
def test_evaluations_within_epochs_change_nothing_else(words: list[str], tmp_path: Path) -> None:
    asked = Run(configured(tmp_path / "often", *IMAGES, *words, "measure_test_every=5"))
    plain = Run(configured(tmp_path / "seldom", *IMAGES, *words))
    assert asked.digest == plain.digest
    rows = read_records(asked.folder.steps_path)
    assert [row["step"] for row in rows if "test_loss" in row] == [4, 9]
    ends = read_records(asked.folder.epochs_path)
    assert [row["step"] for row in ends] == [5, 10]
    for row, end in zip((rows[4], rows[9]), ends, strict=True):
        assert (row["test_loss"], row["accuracy"]) == (end["test_loss"], end["accuracy"])
    assert not any("test_loss" in row for row in read_records(plain.folder.steps_path))
