"""Bytes to a share of dense's accuracy: closed forms on runs of four epochs, each of one step."""

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from experiments.config.errors import UserError
from experiments.reports.earlier_rows import read
from experiments.reports.frames import Frames
from experiments.reports.length_figure import at_several_lengths, draw_lengths
from experiments.reports.reached import means, reached, write_reached
from experiments.reports.run_rows import run_rows

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
        common = {"run": f"{sparsifier}-{seed}", "sparsifier": sparsifier, "variant": ""}
        runs.append({**common, "model": "mlp", "dataset": "digits", "world_size": 4, "density": density, "epochs": 4})
        for epoch, value in enumerate(values):
            step = {"step": epoch, "bytes_sent": BYTES[sparsifier], "density": density, "skipped": False}
            steps.append({**common, **step})
            row = {"epoch": epoch, "step": epoch + 1.0, measure: of(value), "metric": measure}
            epochs.append({**common, **row, "asked_density": density})
    manifests = {"micro-0": "ab", "micro-1": "cd"}
    tables = {"runs": pd.DataFrame(runs), "steps": pd.DataFrame(steps), "epochs": pd.DataFrame(epochs)}
    return Frames(**tables, manifests=manifests, origins={"micro-0": ORIGIN})


def test_a_row_says_what_was_reached_and_after_how_many_bytes() -> None:
    rows = reached(frames()).set_index("sparsifier")
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
    rows = reached(Frames(runs=given.runs, steps=given.steps, epochs=varied))
    assert set(rows["variant"]) == {"lr=0.1"}


def test_of_a_measure_that_falls_the_levels_are_above_the_end_of_dense() -> None:
    rows = reached(frames("perplexity", lambda value: 8 / value)).set_index("sparsifier")
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


def only(*runs: str) -> Frames:
    given = frames()
    parts = {kind: getattr(given, kind) for kind in ("runs", "steps", "epochs")}
    return Frames(**{kind: rows[rows["run"].isin(runs)] for kind, rows in parts.items()})


def test_the_table_of_runs_says_what_their_folders_said(tmp_path: Path) -> None:
    write_reached(frames(), tmp_path)
    alone = write_reached(only("topk-0"), tmp_path / "again", read(None, tmp_path / "reached_runs.csv"))
    for name in ("reached.csv", "reached_runs.csv"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / name).read_text()
    assert len(alone) == 3


def test_rows_of_runs_that_are_gone_stay_and_new_ones_are_compared_with_their_dense_row(tmp_path: Path) -> None:
    write_reached(only("dense-0", "dense-1", "topk-0"), tmp_path)
    earlier = read(tmp_path / "reached.csv", None)
    write_reached(only("micro-0", "micro-1"), tmp_path / "new", earlier)
    merged = pd.read_csv(tmp_path / "new" / "reached.csv").set_index("sparsifier")
    assert list(merged["is_earlier"]) == [True, True, False]
    whole = reached(frames()).set_index("sparsifier")
    for key in ("value", "to_dense", "bytes_90", "epochs_95", "num_99", "total_bytes"):
        assert merged[key].round(9).fillna(-1).to_dict() == whole[key].round(9).fillna(-1).to_dict(), key
    text = (tmp_path / "new" / "reached.md").read_text()
    assert "2 of 3 rows are from an earlier table" in text
    (topk,) = (line for line in text.splitlines() if line.startswith("| Top-k"))
    assert "unknown*" in topk


def test_an_earlier_row_stays_until_as_many_seeds_are_at_hand(tmp_path: Path) -> None:
    write_reached(frames(), tmp_path)
    earlier = read(tmp_path / "reached.csv", None).means
    fewer = means(run_rows(only("micro-0")), earlier).set_index("sparsifier")
    assert (fewer.loc["micro", "num_seeds"], bool(fewer.loc["micro", "is_earlier"])) == (2, True)
    other = run_rows(only("dense-0", "dense-1", "micro-0", "micro-1"))
    other.loc[other["sparsifier"] == "dense", "curve"] = "4 0.9 4000"
    rows = means(other, earlier).set_index("sparsifier")
    assert rows["is_earlier"].to_dict() == {"dense": True, "topk": True, "micro": False}
    assert rows.loc["dense", "value"] == 0.8, "one dense row in a study, while rows stay that were compared with it"
    alone = means(other, earlier[earlier["sparsifier"] != "topk"]).set_index("sparsifier")
    assert (alone.loc["dense", "value"], bool(alone["is_earlier"].any())) == (0.9, False)


def test_studies_without_a_run_at_hand_stay(tmp_path: Path) -> None:
    write_reached(frames(), tmp_path)
    earlier = read(tmp_path / "reached.csv", None).means.assign(epochs=9)
    rows = means(run_rows(frames()), earlier)
    assert rows["epochs"].value_counts().to_dict() == {4: 3, 9: 3}


def test_runs_of_other_settings_are_not_taken_for_repetitions(tmp_path: Path) -> None:
    write_reached(frames(), tmp_path)
    path = tmp_path / "reached_runs.csv"
    rows = pd.read_csv(path)
    rows.assign(run="other", settings="ab").query("sparsifier == 'topk'").to_csv(path, index=False)
    given = frames()
    settled = Frames(
        **{kind: getattr(given, kind) for kind in ("runs", "steps", "epochs")}, settings={"topk-0": {"lr": 0.1}}
    )
    with pytest.raises(UserError, match="topk-0 and other differ in more than the seed"):
        write_reached(settled, tmp_path, read(None, path))


@pytest.mark.parametrize("text", ["", "model,value\nmlp,1\n", "run,curve\na,1 2\n", "run,curve\na,1 b 3\n"])
def test_a_table_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(UserError, match="is no"):
        read(path, None)
    with pytest.raises(UserError, match="is no"):
        read(None, path)
    with pytest.raises(UserError, match="cannot be read"):
        read(None, tmp_path / "none.csv")


def test_the_figure_of_lengths_has_a_line_for_what_was_trained_at_several() -> None:
    short = reached(frames())
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
