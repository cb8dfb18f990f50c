"""The theory tool says of known vectors what is known, and writes what it promises."""

import itertools
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments import theory
from experiments.tools.shared.selection_times import wide_spread
from experiments.tools.theory.measure import check
from tests.legible import every_figure_is_legible


def test_equal_magnitudes_break_the_bound_and_normal_values_keep_it() -> None:
    normal = check(torch.randn(4000, generator=torch.Generator().manual_seed(0)))
    equal = check(torch.ones(400))
    assert normal["holds"]
    assert normal["worst_ratio"] < 1
    assert abs(normal["excess_kurtosis"]) < 0.5
    assert not equal["holds"]
    assert not equal["below_line"]
    assert math.isnan(equal["excess_kurtosis"])
    assert equal["worst_ratio"] == pytest.approx(1 / (1 - equal["worst_share"]))  # (1 - s) / (1 - s)^2


def test_everything_is_written_and_the_verdict_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    words = ["batch_size=4", "model=mlp", "--world-size", "2", "--steps", "0,2", "--numel", "2000,4000"]
    with every_figure_is_legible():
        assert theory.main([*words, "--repeats", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "step 2: the bound " in printed
    assert "equal magnitudes: the bound is broken" in printed
    stems = ("histogram", "pi-squared", "error", "operators")
    figures = {f"{stem}.{suffix}" for stem in stems for suffix in ("pdf", "png", "csv")}
    assert {path.name for path in out.iterdir()} == figures | {"theory.csv", "theory.md"}
    assert list(pd.read_csv(out / "theory.csv")["vector"]) == ["step 0", "step 2", "equal magnitudes"]
    times = pd.read_csv(out / "operators.csv")
    assert (times["select_s_low"] <= times["select_s"]).all()
    assert (times["select_s"] <= times["select_s_high"]).all()


def test_times_whose_quartiles_are_far_apart_are_named() -> None:
    quiet = {"method": "micro", "numel": 2000, "select_s": 0.001, "select_s_low": 0.001, "select_s_high": 0.001}
    assert wide_spread(pd.DataFrame([quiet, quiet | {"select_s_high": 0.0011}])) == []
    (line,) = wide_spread(pd.DataFrame([quiet, quiet | {"method": "topk", "numel": 100_000, "select_s_high": 0.023}]))
    assert all(part in line for part in ("topk", "100,000", "23 ms"))


def test_fft_has_its_own_figures_and_formats_are_as_exact_as_their_bits(tmp_path: Path) -> None:
    words = ["--of", "fft", "batch_size=4", "model=mlp", "--world-size", "2", "--steps", "0,2", "--numel", "2000,4000"]
    with every_figure_is_legible():
        assert theory.main([*words, "--density", "0.15", "--repeats", "3", "--out", str(tmp_path)]) == 0
    numbers = {path.stem: pd.read_csv(path) for path in tmp_path.glob("*.csv")}
    assert set(numbers) == {"frequencies", "range-float", "range-float-error", "stages", "link"}
    errors = numbers["range-float-error"].groupby("format")["error"].agg(list)
    assert errors["bfloat16"][0] < 2**-8
    assert all(more / 4 < less < more for more, less in itertools.pairwise(errors["range float"])), "a bit halves it"
    gaps = numbers["range-float"].query("format == 'bfloat16'")["gap"]
    assert gaps.between(2**-8, 2**-7).all()
    rates = numbers["link"].pivot(index="numel", columns="workers", values="rate")
    assert (rates[32] < rates[4]).all(), "what is gathered grows with the workers"
