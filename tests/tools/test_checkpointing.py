"""A stopped and resumed run ends with the weights of an uninterrupted one: all ranks in this process."""

from pathlib import Path
from typing import Any

import pytest

from experiments.config.errors import UserError
from experiments.config.keys import to_yaml
from experiments.runs.records import read_records
from tests.tools.simulated_runs import IMAGES, Run, configured

LETTERS = ["model=cnn_lstm", "model.settings.size=tiny", "dataset=manuals", "dataset.settings.num_train=1500"]
PAIRS = ["model=neumf_small", "dataset=latent", "dataset.settings.num_users=60", "optimizer=adam", "batch_size=50"]
CASES = {
    "images": [*IMAGES, "model=resnet8", "sparsifier=micro"],
    "moving boundaries": [*IMAGES, "sparsifier=exdyna"],
    "no residual": [*IMAGES, "sparsifier=powersgd"],
    "dense": [*IMAGES, "sparsifier=dense"],
    "momentum before": [*IMAGES, "sparsifier=topk", "optimizer.momentum_at=gradient", "optimizer.clip=0.5"],
    "rate inside": [*IMAGES, "sparsifier=micro", "optimizer.lr_at=gradient", "accumulate=2"],
    "published": [*IMAGES, "sparsifier=micro_published", "optimizer=sgd_published", "precision=bfloat16"],
    "rounds": [*IMAGES, "model=resnet8", "sparsifier=micro", "rounds.every=4", "optimizer=adam", "lr=0.01"],
    "outer momentum": [*IMAGES, "sparsifier=dense", "rounds.every=3", "rounds.lr=0.7", "rounds.momentum=0.9"],
    "streaming": [*IMAGES, "rounds.every=4", "rounds.fragments=2", "rounds.delay=3", "rounds.mix=0.5"],
    "carry and dropout": [*LETTERS, "batch_size=4", "dataset.sequence_length=10", "epochs=2", "sparsifier=micro"],
    "pairs": [*PAIRS, "epochs=1", "sparsifier=micro"],
}


def untimed(row: dict[str, Any] | None) -> dict[str, Any]:
    """Return a row without what differs between equal runs."""
    return {key: value for key, value in (row or {}).items() if key not in ("time_s", "words_per_s")}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_ends_with_the_same_weights(tmp_path: Path, case: str) -> None:
    whole = Run(configured(tmp_path / "whole", *CASES[case]))
    steps = whole.trainer.position.step
    first, second = steps // 3, 2 * steps // 3
    parted = configured(tmp_path / "parted", *CASES[case])
    assert Run(parted, stop=first).row is None
    halfway = Run(parted, stop=second)
    assert halfway.began_at == first
    end = Run(parted)
    assert end.began_at == second
    assert end.digest == whole.digest
    assert untimed(end.row) == untimed(whole.row)
    assert [row["loss"] for row in read_records(end.folder.steps_path)] == [
        row["loss"] for row in read_records(whole.folder.steps_path)
    ]
    assert not end.folder.checkpoints_path.exists()


def test_checkpoints_come_by_steps_and_a_torn_one_falls_back(tmp_path: Path) -> None:
    words = [*IMAGES, "sparsifier=micro", "checkpoint.every_steps=2"]
    whole = Run(configured(tmp_path / "whole", *words))
    parted = configured(tmp_path / "parted", *words)
    stopped = Run(parted, stop=7)
    older, newer = sorted(stopped.folder.checkpoints_path.iterdir())
    assert [path.name for path in (older, newer)] == ["step-000000006", "step-000000007"]
    part = newer / "rank1.pt"
    part.write_bytes(part.read_bytes()[:-10])
    end = Run(parted)
    assert end.began_at == 6
    assert "rank1.pt" in end.trainer.unused_checkpoints[0]
    assert end.digest == whole.digest
    assert [row["step"] for row in read_records(end.folder.steps_path)] == list(range(10))


def test_a_run_does_not_start_from_one_that_differs_or_is_further(tmp_path: Path) -> None:
    before = configured(tmp_path, *IMAGES, "sparsifier=micro")
    stopped = Run(before, stop=7)
    stopped.folder.config_path.write_text(to_yaml(before))
    source = f"start_from={stopped.folder.path}"
    for words, key in (
        ([*IMAGES, "rounds.every=2"], r"trained with rounds\.every=0"),
        (["model=mlp", "dataset=digits"], "trained on synthetic"),
        ([*IMAGES, "epochs=1"], "has done 1 epochs, epochs is 1"),
    ):
        with pytest.raises(UserError, match=key):
            configured(tmp_path, *words, "sparsifier=micro", source)
    assert configured(tmp_path, *IMAGES, "sparsifier=micro", source)


def test_another_world_size_is_refused_or_averaged_on_request(tmp_path: Path) -> None:
    words = [*IMAGES, "sparsifier=micro"]
    before = configured(tmp_path, *words, world_size=4)
    stopped = Run(before, stop=3)
    stopped.folder.config_path.write_text(to_yaml(before))
    source = f"start_from={stopped.folder.path}"
    with pytest.raises(UserError, match="had 4 workers, this run has 2: make them equal, or set resize=average"):
        configured(tmp_path, *words, source, world_size=2)
    with pytest.raises(UserError, match="has another sparsifier"):
        configured(tmp_path, *IMAGES, "sparsifier=topk", source, "resize=average", world_size=2)
    after = Run(configured(tmp_path, *words, source, "resize=average", world_size=2), stop=4)
    assert after.began_at == 3
    assert read_records(after.folder.steps_path)[0]["step"] == 3
    assert after.trainer.position.index == 7  # 3 of 4 steps were done, so 6 of 8 are


def test_a_text_continues_in_batches_of_another_size(tmp_path: Path) -> None:
    words = ["model=lstm_small", "model.settings.hidden=8", "dataset=manuals", "dataset.settings.num_train=2000"]
    words += ["dataset.settings.num_test=100", "dataset.sequence_length=10", "sparsifier=topk", "epochs=1"]
    before = configured(tmp_path, *words, "batch_size=8", world_size=2)
    stopped = Run(before, stop=5)
    stopped.folder.config_path.write_text(to_yaml(before))
    source = f"start_from={stopped.folder.path}"
    after = Run(configured(tmp_path, *words, "batch_size=4", source, world_size=2))
    assert after.began_at == 5
    assert after.row is not None
