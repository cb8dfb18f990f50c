"""Waits between updates: counted as by hand, and written as a table, its numbers and a figure."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

import micro
from experiments import staleness
from experiments.studies.staleness.counts import Staleness, Waits

LAYOUT = micro.Layout(("often", "empty", "seldom"), ((10,), (0,), (2, 5)))


def test_waits_are_those_counted_by_hand() -> None:
    seen = Staleness(LAYOUT)
    for step in range(6):
        update = torch.zeros(20)
        update[0:6] = 1.0  # six of ten at every step, the others at every third
        update[6:10] = -1.0 if step % 3 == 0 else 0.0
        update[10:15] = 2.0 if step == 4 else 0.0  # half of them once, the others never
        seen.observe(update)
    waits = seen.by_parameter()
    assert list(waits) == ["often", "seldom"]
    assert waits["often"] == Waits(numel=10, density=pytest.approx(0.6 + 0.4 / 3), median=1.0, tail=3.0, never=0.0)
    assert waits["seldom"].never == 0.5
    assert waits["seldom"].density == pytest.approx(0.5 / 6)
    assert waits["seldom"].median == waits["seldom"].tail == math.inf


def test_of_no_step_nothing_is_known() -> None:
    with pytest.raises(ValueError, match="staleness of no step: call observe first"):
        Staleness(LAYOUT).by_parameter()


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    words = ["model=mlp", "batch_size=4", "density=0.02", "--methods", "dense,micro", "--steps", "3"]
    assert staleness.main([*words, "--world-size", "2", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {f"staleness.{kind}" for kind in ("csv", "md", "pdf", "png")}
    rows = pd.read_csv(out / "staleness.csv")
    sums = rows.assign(updates=rows["density"] * rows["numel"]).groupby("method")[["updates", "numel"]].sum()
    assert sums.loc["micro", "updates"] == pytest.approx(0.02 * sums.loc["micro", "numel"], rel=0.02)
    assert sums.loc["dense", "updates"] > 10 * sums.loc["micro", "updates"]
    assert "| parameter" in (out / "staleness.md").read_text()


def test_what_the_command_sets_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert staleness.main(["sparsifier=topk"]) == 2
    assert "'sparsifier=topk': methods, workers and device are options of the command" in capsys.readouterr().err
