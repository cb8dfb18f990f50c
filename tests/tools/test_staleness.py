"""Waits between updates: counted as by hand, and written as a table, its numbers and a figure."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch

import micro
from experiments import staleness
from experiments.studies.staleness.measure import waits


def test_waits_are_those_counted_by_hand() -> None:
    layout = micro.Layout(("often", "empty", "seldom"), ((10,), (0,), (2, 5)))
    counts = torch.tensor([6] * 6 + [2] * 4 + [1] * 5 + [0] * 5)  # of six steps
    found = waits(counts, layout, 6).set_index("parameter").T
    assert list(found) == ["often", "seldom"]
    assert list(found["often"]) == pytest.approx([10, 0.6 + 0.4 / 3, 1, 3, 0])
    assert list(found["seldom"]) == pytest.approx([10, 0.5 / 6, math.inf, math.inf, 0.5])


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    words = ["model=mlp", "batch_size=4", "density=0.02", "--methods", "dense,micro,micro", "--steps", "3"]
    assert staleness.main([*words, "--world-size", "2", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {f"staleness.{kind}" for kind in ("csv", "md", "pdf", "png")}
    rows = pd.read_csv(out / "staleness.csv")
    sums = rows.assign(updates=rows["density"] * rows["numel"]).groupby("method")[["updates", "numel"]].sum()
    assert sums.loc["micro", "updates"] == pytest.approx(0.02 * sums.loc["micro", "numel"], rel=0.02)
    assert sums.loc["dense", "updates"] > 10 * sums.loc["micro", "updates"]
    assert "| parameter" in (out / "staleness.md").read_text()
