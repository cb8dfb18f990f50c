"""Bytes to a share of dense's accuracy: closed forms on runs of four epochs, each of one step."""

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from experiments.reports.frames import STEP_NUMBERS, Frames
from experiments.reports.length_figure import at_several_lengths, draw_lengths
from experiments.reports.reached import reached, run_rows, write_reached

ACCURACY = {  # of each epoch, by sparsifier and seed
    ("dense", 0): [0.50, 0.70, 0.78, 0.80],
    ("dense", 1): [0.60, 0.76, 0.78, 0.80],
    ("micro", 0): [0.40, 0.73, 0.77, 0.79],
    ("micro", 1): [0.40, 0.60, 0.73, 0.81],
    ("topk", 0): [0.10, 0.20, 0.30, 0.40],
}
ORIGIN = {"code revisions": "ab12", "machines": "2 cores", "versions of torch": "2.15.0", "runs at once": "1"}
BYTES = {"dense": 1000, "micro": 20, "topk": 50}  # a step


def frames(measure: str = "accuracy", of: Callable[[float], float] = lambda value: value) -> Frames:
    runs, steps, epochs = [], [], []
    for (sparsifier, seed), values in ACCURACY.items():
        density = 1.0 if sparsifier == "dense" else 0.1
        common = {
            "run": f"{sparsifier}-{seed}",
            "sparsifier": sparsifier,
            "variant": "",
            "cluster": "local",
            "world_size": 4,
        }
        runs.append({**common, "model": "mlp", "dataset": "digits", "density": density, "epochs": 4})
        for epoch, value in enumerate(values):
            step = {"step": epoch, "bytes_sent": BYTES[sparsifier], "density": density, "skipped": False}
            steps.append({**common, **step})
            row = {"epoch": epoch, "step": epoch + 1.0, measure: of(value), "metric": measure}
            epochs.append({**common, **row, "asked_density": density})
    manifests = {"micro-0": "ab", "micro-1": "cd"}
    columns = [*common, "skipped", *STEP_NUMBERS]
    rows = pd.DataFrame(steps).reindex(columns=dict.fromkeys(columns))
    tables = {"runs": pd.DataFrame(runs), "steps": rows, "epochs": pd.DataFrame(epochs)}
    return Frames(**tables, manifests=manifests, origins={"micro-0": ORIGIN})


def test_a_row_says_what_was_reached_and_after_how_many_bytes() -> None:
    rows = reached(run_rows(frames())).set_index("sparsifier")
    assert list(rows.index) == ["dense", "topk", "micro"]
    micro = rows.loc["micro"]  # dense ends at 0.80: the levels are 0.72, 0.76 and 0.792
    assert math.isclose(micro["value"], 0.80)
    assert math.isclose(micro["half_range"], 0.01)
    assert abs(micro["to_dense"]) < 1e-12
    assert (micro["num_seeds"], micro["total_bytes"], micro["measured_density"]) == (2, 80, 0.1)
    assert (micro["num_90"], micro["epochs_90"], micro["bytes_90"]) == (2, 2.5, 50)
    assert (micro["num_95"], micro["epochs_95"], micro["bytes_95"]) == (2, 3.5, 70)
    assert (micro["num_99"], micro["epochs_99"], micro["bytes_99"]) == (1, 4, 80)
    assert rows.loc["topk", "num_90"] == 0
    assert math.isnan(rows.loc["topk", "bytes_90"])


def test_the_length_stands_in_the_heading_not_at_each_method() -> None:
    given = frames()
    varied = given.epochs.assign(variant="epochs=4, lr=0.1")
    rows = reached(run_rows(Frames(runs=given.runs, steps=given.steps, epochs=varied)))
    assert set(rows["form"]) == {"lr=0.1"}


def test_of_a_measure_that_falls_the_levels_are_above_the_end_of_dense() -> None:
    rows = reached(run_rows(frames("perplexity", lambda value: 8 / value))).set_index("sparsifier")
    micro = rows.loc["micro"]  # dense ends at 10: the levels are 11.11, 10.53 and 10.10
    assert (micro["num_90"], micro["epochs_90"]) == (2, 2.5)
    assert (micro["num_95"], micro["epochs_95"]) == (2, 3.5)
    assert rows.loc["topk", "to_dense"] < 0


def test_the_table_says_what_is_missing(tmp_path: Path) -> None:
    write_reached(frames(), tmp_path)
    text = (tmp_path / "reached.md").read_text()
    (micro,) = (line for line in text.splitlines() if line.startswith("| MiCRO"))
    cells = [cell.strip() for cell in micro.split("|")[1:-1]]
    assert cells[:7] == ["MiCRO", "0.1", "2", "80.00 ± 1.00", "+0.00", "0.1", "80 B"]
    assert cells[7:10] == ["50 B, 2.5", "70 B, 3.5", "80 B, 4 (1 of 2)"]
    assert sum(line.count(" never ") for line in text.splitlines() if line.startswith("| Top-k")) == 3
    assert cells[10] == "ab12, unknown", "one run has no manifest that says"
    assert text.endswith(
        "code revisions: ab12 (1); machines: 2 cores (1); versions of torch: 2.15.0 (1); runs at once: 1 (1).\n"
    )
    alone = frames()
    alone = Frames(runs=alone.runs.query("sparsifier == 'micro'"), steps=alone.steps, epochs=alone.epochs)
    assert write_reached(alone, tmp_path) == []


def test_the_figure_of_lengths_has_a_line_for_what_was_trained_at_several() -> None:
    short = reached(run_rows(frames()))
    long = short[short["sparsifier"] != "topk"].assign(epochs=8, to_dense=[0.0, -0.02], half_range=[0.0, 0.01])
    rows = at_several_lengths(pd.concat([short, long], ignore_index=True))
    assert sorted(rows["sparsifier"]) == ["dense", "dense", "micro", "micro"]
    figure = draw_lengths(rows, "Lengths")
    (axes,) = figure.axes
    (bars,) = axes.containers
    points = {float(x): float(y) for x, y in zip(*bars.lines[0].get_data(), strict=True)}
    assert points == pytest.approx({4.0: 0.0, 8.0: -2.0})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["MiCRO, 0.1", "dense, spread of its seeds"]
    assert at_several_lengths(short).empty
