"""The benchmarks whose tables stand on the pages run, small, through their entry point."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.bench import main
from experiments.benchmarks.gpu import steps
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
MLP = ["model=mlp", "dataset=synthetic", "batch_size=4"]


def bench(folder: Path, *words: str) -> pd.DataFrame:
    """Run a benchmark, which makes its folder, and return its table."""
    main([words[0], "--out", str(folder / "new" / "out"), *words[1:]])
    return pd.read_csv(folder / "new" / "out" / f"{words[0]}.csv")


def test_loop(tmp_path: Path) -> None:
    table = bench(tmp_path, "loop", "--steps", "2", *MLP)
    assert len(table) == 1
    assert (table[["harness_s", "bare_s", "ratio"]] > 0).all(axis=None)


@pytest.mark.xdist_group("ranks")
def test_steps_of_several_ranks_have_a_time_and_bytes() -> None:
    for method, sent in (("topk", None), ("dense", 4000)):  # of 1000 numbers, twice a half
        for row in ranks(2).run(steps.work, method, 1000):
            assert row["problem"] == ""
            assert row["step_s"] > 0
            assert sent is None or row["sent"] == sent


def test_rules(tmp_path: Path) -> None:
    table = bench(tmp_path, "rules", "--numel", "2000", "--density", "0.01", "--world-size", "2", "--steps", "6")
    assert set(table["rule"]) == {"agreed", "repaired", "published"}
    assert len(table) == 3 * 4 * 6  # rules, gradients, steps
    assert (tmp_path / "new" / "out" / "rules.pdf").exists()
