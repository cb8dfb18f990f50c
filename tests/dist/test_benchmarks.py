"""The benchmarks whose tables stand on the pages run, small, through their entry point."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.bench import main
from experiments.benchmarks import loop
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


def test_the_loop_takes_medians_over_pairs_and_the_slowest_rank() -> None:
    assert loop.over_ranks([((2.0, 1.0), (1.0, 1.0)), ((3.0, 2.0), (0.5, 3.0))]) == ((3.0, 1.5), (1.0, 2.0))
    found = loop.summary([((ratio, 4.0), (1.0, 3.5)) for ratio in (1.0, 9.0, 1.1, 1.2, 0.1)])
    assert (found["ratio"], found["ratio_low"], found["ratio_high"]) == (1.1, 0.1, 9.0)
    assert (found["harness_s"], found["bare_s"], found["added_cpu_s"]) == (1.1, 1.0, 0.5)
    many = loop.summary([((float(ratio), 1.0), (1.0, 1.0)) for ratio in range(101)])
    assert (many["ratio_low"], many["ratio_high"]) == (40.0, 60.0)


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
