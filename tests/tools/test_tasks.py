"""Measures are the same number at every world size, and each kind of data goes with its models alone."""

import json
import math
from pathlib import Path

import pytest
import torch

import data
from experiments.config.errors import UserError
from experiments.training.tasks import Task, _Language, load_task, steps_per_epoch
from tests.in_process import call
from tests.tools.simulated_runs import IMAGES, configured

CPU = torch.device("cpu")
LETTERS = ["dataset=manuals", "batch_size=2"]
TASKS = {
    "images": [*IMAGES, "model=mlp"],
    "text": [*LETTERS, "model=lstm_small", "model.settings.hidden=8", "dataset.settings.num_test=3000"],
    "masked": [*LETTERS, "model=bert_tiny", "dataset.settings.num_test=1000"],
    "pairs": ["model=neumf_small", "dataset=latent", "dataset.settings.num_users=70", "batch_size=10"],
}


def task_of(tmp_path: Path, name: str) -> Task:
    if name == "masked":
        pytest.importorskip("transformers", reason="needs transformers")
    return load_task(configured(tmp_path, *TASKS[name], "sparsifier=dense", world_size=2), CPU)


@pytest.mark.parametrize("name", TASKS)
def test_measures_are_the_same_at_every_world_size(tmp_path: Path, name: str) -> None:
    task = task_of(tmp_path, name)
    whole = task.evaluate(0, 1)
    for world_size in (2, 3, 50):
        shares = torch.stack([task.evaluate(rank, world_size) for rank in range(world_size)])
        assert shares[:, -1].sum() == whole[-1]
        together, alone = task.measures(shares.sum(0)), task.measures(whole)
        assert together == pytest.approx(alone, rel=1e-5)
    assert task.model.training


@pytest.mark.parametrize(("name", "fewest"), [("text", 64), ("masked", 32), ("long", 70)])
def test_the_shortest_test_text_that_is_taken_can_be_measured(tmp_path: Path, name: str, fewest: int) -> None:
    if name == "masked":
        pytest.importorskip("transformers", reason="needs transformers")
    words = [*TASKS["masked" if name == "masked" else "text"], *(["dataset.sequence_length=70"] * (name == "long"))]
    with pytest.raises(UserError, match=f"{fewest} words .* got {fewest - 1}"):
        configured(tmp_path, *words, f"dataset.settings.num_test={fewest - 1}")
    task = load_task(configured(tmp_path, *words, f"dataset.settings.num_test={fewest}"), CPU)
    assert task.evaluate(0, 1)[-1] > 0


def test_a_text_of_drawn_rows_has_one_at_least(tmp_path: Path) -> None:
    words = [*LETTERS, "model=gpt_small", "dataset.sequence_length=64", "dataset.drawn=4"]
    with pytest.raises(UserError, match=r"training text .* 65 words .* got 64"):
        configured(tmp_path, *words, "dataset.settings.num_train=64")
    assert load_task(configured(tmp_path, *words, "dataset.settings.num_train=65"), CPU).batches(0).num_batches == 4


def test_files_that_are_no_part_of_a_text_are_named_on_the_terminal_and_in_the_manifest(tmp_path: Path) -> None:
    root = tmp_path / "text"
    root.mkdir()
    for name in ("train", "valid", "novel", *(f"chapter-{number:02}" for number in range(20))):
        (root / f"{name}.txt").write_text("words of a text\n" * 40)
    words = ["train", "model=gpt_small", "model.settings.hidden=8", "dataset=text", f"dataset.root={root}", "epochs=1"]
    words += ["dataset.sequence_length=16", "batch_size=2", "sparsifier=dense", "cluster=simulated"]
    called = call([*words, "cluster.world_size=2", f"output={tmp_path / 'out'}"])
    assert called.code == 0
    (line,) = [line for line in called.err.splitlines() if "chapter-00.txt" in line]
    assert len(line) < 300
    (manifest,) = (tmp_path / "out").rglob("manifest.json")
    unused = json.loads(manifest.read_text())["data_unused"]
    assert sorted(unused) == [*(f"chapter-{number:02}.txt" for number in range(20)), "novel.txt"]


@pytest.mark.parametrize("name", TASKS)
def test_the_steps_foretold_are_those_that_come(tmp_path: Path, name: str) -> None:
    task = task_of(tmp_path, name)
    config = task.config
    info = data.info(config.dataset.name, config.dataset.root, **config.dataset.settings)
    assert steps_per_epoch(config, info) == task.batches(0).num_batches == task.batches(1).num_batches > 0


def test_bits_per_byte_count_the_bytes_of_the_tokens() -> None:
    measures = _Language.measures(torch.tensor([6 * math.log(2), 12.0, 3.0]))  # 6 bits, 12 bytes, 3 tokens
    assert (measures["bits_per_byte"], measures["perplexity"]) == pytest.approx((0.5, 4))
