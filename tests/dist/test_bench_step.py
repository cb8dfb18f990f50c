"""`bench step`: every method compared with its floor, or with an older revision of this code."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.bench import main
from experiments.tools.bench.step import command, older
from experiments.tools.bench.step.traffic import bytes_per_element
from micro import kernels

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
WORDS = ("step", "--numel", "2000", "--density", "0.05", "--steps", "2", "--limit", "0.01", "--methods", "micro,topk")
OLDER = "7b6e910"  # its files of measurement stand elsewhere


def test_methods_are_compared_with_their_floors(tmp_path: Path) -> None:
    main([*WORDS, "--out", str(tmp_path)])
    table = pd.read_csv(tmp_path / "step.csv")
    assert table["method"].tolist() == ["micro", "topk", "(torch.topk alone)"]
    assert (table[["total_s", "floor_s", "floors"]] > 0).all(axis=None)
    assert (table["bytes_per_element"][:2] >= 16).all()
    assert (tmp_path / "step.md").exists()


def test_an_older_revision_and_this_code_take_turns(tmp_path: Path) -> None:
    if older._git("cat-file", "-e", OLDER) is None:
        pytest.skip("a clone without history has no older revision")
    main([*WORDS, "--against", OLDER, "--pairs", "2", "--out", str(tmp_path)])
    table = pd.read_csv(tmp_path / "step-against.csv")
    assert table["method"].tolist() == ["micro", "topk"]
    assert (table[["floors", "old_floors", "new_floors", "total_s"]] > 0).all(axis=None)
    assert table["bytes_sent"].tolist() == pytest.approx([1.0, 1.0], abs=0.1)


def test_ratios_are_of_pairs_of_turns() -> None:
    def steps(*floors: float) -> list[dict[str, float]]:
        return [{"floors": each, "own_s": each, "total_s": 2 * each, "bytes_sent": 8.0} for each in floors]

    pairs = [{command.OLD: steps(2, 9, 2), command.NEW: steps(1)}, {command.OLD: steps(4), command.NEW: steps(2)}]
    row = command.compared(pairs)
    assert (row["floors"], row["total_s"], row["bytes_sent"]) == (0.5, 0.5, 1.0)
    assert (row["old_floors"], row["new_floors"]) == (3.0, 1.5)


def test_bytes_include_operations_and_compiled_loops() -> None:
    x, residual = torch.ones(5000), torch.zeros(5000)

    def step() -> None:
        kernels.absorb_(residual, x)  # 16 bytes an element
        residual[:2500].abs().sum()  # reads 4, writes 4, reads 4 of a half
        residual.view(50, 100)[0, :10].sum()  # next to nothing
        torch.empty_like(x)
        x.index_select(0, torch.arange(10))

    assert bytes_per_element(step, 5000) == pytest.approx(16 + (4 + 4 + 4) / 2, abs=0.01)
