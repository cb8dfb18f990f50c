"""Words in a second, and the share of a device's arithmetic that a language model uses."""

import math
from pathlib import Path

import pytest
import torch

import models
from experiments.runs.records import read_records
from experiments.training import throughput
from tests.tools.simulated_runs import Run, configured

TEXT = [
    *("model=gpt_small", "model.settings.hidden=16", "model.settings.num_layers=1", "dataset=manuals_bytes"),
    *("dataset.settings.num_train=2000", "dataset.settings.num_test=500", "dataset.sequence_length=16", "batch_size=4"),
    *("accumulate=2", "sparsifier=dense", "epochs=1"),
]
WIDTH, LAYERS, LENGTH = 16, 1, 16
PER_WORD = 6 * (LAYERS * 12 * WIDTH**2 + 256 * WIDTH) + 12 * LAYERS * WIDTH * LENGTH  # of forward and backward


def test_a_decoder_counts_its_maps_and_its_attention() -> None:
    model = models.build("gpt", sizes={"num_words": 256}, hidden=WIDTH, num_layers=LAYERS, num_heads=4)
    assert 3 * model.flops_per_word(LENGTH) == PER_WORD  # type: ignore[operator]


@pytest.mark.parametrize("peak", ["0.5", "0"])
def test_a_run_records_words_a_second_and_utilisation(
    tmp_path: Path, peak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "measured_peak", lambda *_: 2e12)
    run = Run(configured(tmp_path, *TEXT, f"peak_tflops={peak}"))
    assert run.row is not None
    words = run.row["step"] * 3 * 2 * 4 * LENGTH  # type: ignore[operator]  # workers, batches, columns
    assert run.row["words_per_s"] == pytest.approx(words / run.row["time_s"])  # type: ignore[operator]
    assert run.row["peak_tflops"] == (0.5 if peak == "0.5" else 2)
    assert run.row["peak_from"] == ("setting" if peak == "0.5" else "product of matrices")
    expected = PER_WORD * run.row["words_per_s"] / (run.row["peak_tflops"] * 1e12)  # type: ignore[operator]
    assert run.row["mfu"] == pytest.approx(expected)  # simulated workers share one device
    assert read_records(run.folder.epochs_path)[-1]["mfu"] == run.row["mfu"]


def test_what_is_not_asked_for_or_has_no_words_is_not_recorded(tmp_path: Path) -> None:
    row = Run(configured(tmp_path / "text", *TEXT)).row
    assert row is not None
    assert "words_per_s" in row
    assert "mfu" not in row


def test_the_product_of_matrices_is_a_number_of_operations_in_a_second() -> None:
    assert 1e6 < throughput.measured_peak(torch.device("cpu"), torch.float32, side=64) < math.inf
