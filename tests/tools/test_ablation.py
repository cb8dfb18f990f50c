"""Forms of an ablation: what each changes, in words, and what it reached beside dense at the best of its rates."""

import itertools
from pathlib import Path

import pandas as pd

from experiments.reports.ablation import forms, tuned, write_ablation
from experiments.reports.forms import changes
from experiments.reports.frames import Frames

MICRO = {"sparsifier.name": "micro", "sparsifier.feedback": "residual", "lr": 0.01, "density": 0.01}
CLIPPED = {"optimizer.clip_at": "update"}
DECAYING = {"sparsifier.feedback.name": "residual", "sparsifier.feedback.decay": 0.9}
RUNS = {  # the settings of each run but for the seed, and what each seed reached
    "dense": (MICRO | {"sparsifier.name": "dense"}, [0.6, 0.7]),
    "dense fast": (MICRO | {"sparsifier.name": "dense", "lr": 0.1}, [0.5, 0.6]),
    "dense in rounds": (MICRO | {"sparsifier.name": "dense", "rounds.every": 5}, [0.8, 0.8]),
    "micro": (MICRO, [0.5, 0.5]),
    "micro fast": (MICRO | {"lr": 0.1}, [0.6, 0.6]),
    "steps": (MICRO | {"rounds.every": 1}, [0.7, 0.6]),
    "decay": ({key: value for key, value in MICRO.items() if key != "sparsifier.feedback"} | DECAYING, [0.4, 0.5]),
    "clip": (MICRO | CLIPPED, [0.4, 0.4]),
}


def frames(*models: str) -> Frames:
    models = models or ("mlp",)
    runs, steps, epochs, settings = [], [], [], {}
    for model, (name, (config, values)) in itertools.product(models, RUNS.items()):
        for seed, value in enumerate(values):
            run = f"{model}-{name}-{seed}".removeprefix("mlp-")
            settings[run] = {**config, "model.name": model, "seed": seed, "output": f"results/{seed}"}
            own = {"run": run, "sparsifier": config["sparsifier.name"], "variant": ""}
            runs.append({**own, "model": model, "dataset": "digits", "world_size": 4})
            sent = 1000 if own["sparsifier"] == "dense" else 20
            steps.append({**own, "step": 0, "bytes_sent": sent, "density": 0.01, "skipped": False})
            epochs.append({**own, "epoch": 0, "step": 1.0, "accuracy": value, "metric": "accuracy"})
    tables = {"runs": pd.DataFrame(runs), "steps": pd.DataFrame(steps), "epochs": pd.DataFrame(epochs)}
    return Frames(**tables, settings=settings)


def test_a_form_is_named_by_what_is_not_usual() -> None:
    found = changes(frames().settings)
    assert found["micro-0"] == found["dense-1"] == {}
    assert found["micro fast-0"] == {"lr": "0.1"}
    assert found["steps-1"] == {"rounds.every": "1"}
    assert found["decay-0"] == {"feedback": "residual", "feedback.decay": "0.9"}
    assert found["clip-0"] == {"optimizer.clip_at": "update"}


def test_forms_stand_beside_dense_at_the_best_of_its_rates() -> None:
    rows = forms(frames()).set_index(["sparsifier", "change", "rate"])
    dense = rows.loc[("dense", "", 0.01)]
    assert (dense["value"].round(9), dense["to_dense"]) == (0.65, 0)
    assert rows.index[0] == ("dense", "rounds.every=5", 0.01), "the best form comes first, though it is no baseline"
    steps = rows.loc[("micro", "rounds.every=1", 0.01)]
    assert abs(steps["to_dense"]) < 1e-9
    assert (steps["low"], steps["high"], steps["num_seeds"], steps["of_dense"]) == (0.6, 0.7, 2, 0.02)
    assert rows.loc[("micro", "optimizer.clip_at=update", 0.01), "to_dense"].round(9) == -0.25


def test_two_studies_in_one_folder_do_not_name_each_other() -> None:
    both, alone = forms(frames("mlp", "gpt")), forms(frames())
    assert len(both) == 2 * len(alone)
    assert set(both["change"]) == set(alone["change"])


def test_the_best_of_several_rates_names_their_number() -> None:
    best = tuned(forms(frames())).set_index("sparsifier")
    assert list(best.index) == ["dense", "micro"], "forms of one rate have nothing to choose"
    assert (best.loc["micro", "rate"], best.loc["micro", "trials"]) == (0.1, 2)
    assert best.loc["dense", "rate"] == 0.01


def test_table_and_figure_are_written(tmp_path: Path) -> None:
    names = {path.name for path in write_ablation(frames(), tmp_path)}
    assert {"ablation.md", "ablation.csv", "ablation-mlp-digits-n4.png"} <= names
    lines = (tmp_path / "ablation.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| MiCRO (rounds.every=1)"))
    assert [cell.strip() for cell in row.split("|")[2:9]] == [
        "0.01",
        "2",
        "65.00 ± 5.00",
        "+0.00",
        "0.01",
        "20 B",
        "2 %",
    ]
    sparse = frames()
    sparse = Frames(
        runs=sparse.runs.query("sparsifier == 'micro'"),
        steps=sparse.steps,
        epochs=sparse.epochs,
        settings={run: found for run, found in sparse.settings.items() if "dense" not in run},
    )
    assert write_ablation(sparse, tmp_path) == []
