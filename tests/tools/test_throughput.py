"""Words in a second, and the share of a device's arithmetic that a language model uses."""

from pathlib import Path

import pytest

import models
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


def test_a_run_records_words_a_second_and_with_a_peak_utilisation(tmp_path: Path) -> None:
    run = Run(configured(tmp_path, *TEXT, "peak_tflops=0.5"))
    assert run.row is not None
    words = run.row["step"] * 3 * 2 * 4 * LENGTH  # type: ignore[operator]  # workers, batches, columns
    assert run.row["words_per_s"] == pytest.approx(words / run.row["time_s"])  # type: ignore[operator]
    # simulated workers share one device
    assert run.row["mfu"] == pytest.approx(PER_WORD * run.row["words_per_s"] / 0.5e12)
    without = Run(configured(tmp_path / "text", *TEXT)).row
    assert without is not None
    assert "mfu" not in without
