"""An advice is measured epochs times predicted steps, and says where nothing is known."""

from pathlib import Path

import pandas as pd
import pytest

from experiments import advise
from experiments.studies.advice.evidence import load_evidence
from experiments.studies.advice.prediction import Setting, forms_of, predict, step_of
from micro.planning.traces import Layer, Trace
from tests.refusals import refused

ROWS = [  # method, density, epochs to 95 %, seeds there, distance to dense; three seeds each
    ("dense", 1, 4.0, 3, 0.0),
    ("micro", 0.1, 5.0, 3, -0.01),
    ("micro", 0.01, 8.0, 3, -0.02),
    ("topk", 0.01, 6.0, 2, -0.03),
    ("powersgd", 1, 4.0, 3, 0.0),
]
TRACE = Trace(
    model="mlp",
    layers=tuple(Layer(f"{place}.weight", 4_000_000, 0.002 * (place + 1), 0.001) for place in range(4)),
    forward_s=0.008,
    backward_s=0.016,
    update_s=0.001,
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    common = {"model": "mlp", "dataset": "digits", "world_size": 4, "form": "", "num_seeds": 3, "metric": "accuracy"}
    rows = [
        {**common, "epochs": epochs, "sparsifier": method, "density": density, "epochs_95": reached, "num_95": there}
        | {"to_dense": gap}
        for epochs, factor in ((30, 1), (10, 100))  # of the shorter runs nothing may be taken
        for method, density, reached, there, gap in [(m, d, factor * e, n, g) for m, d, e, n, g in ROWS]
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "summary.csv", index=False)
    return tmp_path / "summary.csv"


SETTING = Setting(TRACE, world_size=4, latency_s=1e-4, select=None, memory_gb_s=10)


def test_runs_of_another_number_of_workers_and_dense_at_a_worse_rate_are_left_out(table: Path) -> None:
    frame = pd.read_csv(table)
    others = frame[:3].assign(world_size=16, epochs_95=1.0)
    worse = frame[:1].assign(to_dense=-0.1, epochs_95=9.0)
    pd.concat([worse, frame, others]).to_csv(table, index=False)
    found = load_evidence(table, 95).runs
    assert list(found["method"]) == ["dense", "micro", "micro", "topk", "powersgd"]
    assert list(found["epochs_there"][:3]) == [4.0, 5.0, 8.0]


@pytest.mark.parametrize("rate", [1e7, 1e12])
def test_time_is_epochs_times_step_at_the_best_density(table: Path, rate: float) -> None:
    rows = predict(forms_of(load_evidence(table, 95), SETTING), rate).set_index("method")
    epochs = {0.1: 5.0, 0.01: 8.0}
    steps = {density: step_of("micro", density, SETTING)(rate) for density in epochs}
    dense_s = 4.0 * step_of("dense", 1.0, SETTING)(rate)
    best = min(epochs, key=lambda density: epochs[density] * steps[density])
    assert best == (0.01 if rate == 1e7 else 0.1), "few bytes count on a slow link, few epochs on a fast one"
    assert (rows.loc["micro", "density"], rows.loc["micro", "num_seeds"]) == (best, 3)
    assert rows.loc["micro", "time"] == pytest.approx(epochs[best] * steps[best] / dense_s)


def test_at_its_border_a_method_takes_as_long_as_dense(table: Path) -> None:
    forms = forms_of(load_evidence(table, 95), SETTING)
    border = predict(forms, 1e9).set_index("method").loc["micro", "border"]
    assert predict(forms, float(border)).set_index("method").loc["micro", "time"] == pytest.approx(1, abs=0.02)


def test_what_is_not_known_is_said(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "new" / "out"
    TRACE.save(trace)
    words = ["--evidence", str(table), "--trace", str(trace), "--link-mbit", "1000", "--out", str(out)]
    assert advise.main(words) == 0
    text = capsys.readouterr().out
    assert "- Top-k: no evidence: at 0.01 2 of 3 seeds came there, the end is -3.00 accuracy %." in text
    assert "- PowerSGD: no prediction: what powersgd sends depends on the parameters' shapes" in text
    assert (out / "advice.md").read_text() in text
    lines = pd.read_csv(out / "advice-rates.csv")
    assert set(lines["method"]) == {"micro"}
    assert lines["time"].is_monotonic_increasing, "the faster the link, the less there is to gain"


def test_evidence_that_does_not_fit_is_refused(table: Path) -> None:
    refused(lambda: load_evidence(table, 95, "mlp-digit"), "--task must be one of mlp-digits", "did you mean")
    refused(lambda: load_evidence(table, 90), "it has no num_90, epochs_90")
    frame = pd.read_csv(table)
    for wrong, part in ((frame.assign(num_seeds="three"), "invalid"), (frame[frame["sparsifier"] != "dense"], "dense")):
        wrong.to_csv(table, index=False)
        refused(lambda: load_evidence(table, 95), part)
