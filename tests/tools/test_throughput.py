"""Words in a second, and the share of a device's arithmetic that a language model uses."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import models
from experiments.runs.records import read_records
from experiments.training.simulated_workers import SimulatedWorkers
from tests.tools.simulated_runs import IMAGES, Run, configured

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


def test_training_time_holds_what_the_harness_does_between_steps_and_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def advance(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("experiments.training.loop.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    evaluate, take_step = SimulatedWorkers.evaluate, SimulatedWorkers.take_step
    monkeypatch.setattr(SimulatedWorkers, "evaluate", lambda workers: (advance(1000), evaluate(workers))[1])
    monkeypatch.setattr(SimulatedWorkers, "take_step", lambda *given: (advance(1), take_step(*given))[1])
    config = configured(tmp_path, *IMAGES, "measure_test_every=2")
    run = Run(config, at={3: lambda: advance(10)})
    rows = read_records(run.folder.steps_path)
    assert {row["step_s"] for row in rows} == {1}
    assert [row["wall_s"] for row in rows] == [1, 1, 1, 11, *[1] * (len(rows) - 4)]
    assert run.row is not None
    assert rows[-1]["time_s"] == run.row["time_s"] == len(rows) + 10
