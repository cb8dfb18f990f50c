"""The benchmarks whose tables stand on the pages run, small, through their entry point."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from experiments.bench import main
from experiments.tools.bench.gpu.parts import PARTS, against_cpu
from experiments.tools.bench.gpu.training import SHARDED, Settings
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def bench(folder: Path, *words: str) -> pd.DataFrame:
    """Run a benchmark, which makes its folder, and return its table."""
    main([words[0], "--out", str(folder / "new" / "out"), *words[1:]])
    return pd.read_csv(folder / "new" / "out" / f"{words[0]}.csv")


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("steps", ("DDP alone", "hook fp16", "dense", "micro")),
        ("fsdp", SHARDED),
    ],
)
def test_parts_of_the_report_on_gpus_measure_ranks_on_the_cpu(part: str, names: Sequence[str]) -> None:
    settings, chosen = Settings(device="cpu", numel=2000, methods=()), PARTS[part]
    for name in names:
        (row, *_), _ = ranks(2).run(chosen.work, settings, name)
        assert row["name"] == name
        assert not row.get("problem")
        known = {column.key for column in chosen.columns.values()} & row.keys() - {"name", "problem"}
        assert len(known) >= 2
        assert all(row[key] >= 0 for key in known)


def test_methods_are_compared_with_the_cpu() -> None:
    (row,) = against_cpu(Settings(device="cpu", numel=2000, methods=()), "micro")
    assert (row["difference"], row["places"]) == (0, 0)
