"""Forms of an ablation: what each changes, in words, and what it reached beside dense at the best of its rates."""

import itertools
from pathlib import Path

import pandas as pd
import pytest

from experiments.figures import main
from experiments.reports.ablation import TABLE, form_rows, forms, tuned, write_ablation
from experiments.reports.ablation_figure import draw_forms
from experiments.reports.earlier_rows import read
from experiments.reports.forms import changes
from experiments.reports.frames import Frames
from experiments.reports.measures import metric_of

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
            place = {"model.name": model, "dataset.name": "digits", "cluster.world_size": 4}
            settings[run] = {**config, **place, "seed": seed, "output": f"results/{seed}"}
            own = {"run": run, "sparsifier": config["sparsifier.name"], "variant": ""}
            runs.append({**own, "model": model, "dataset": "digits", "world_size": 4})
            sent = 1000 if own["sparsifier"] == "dense" else 20
            steps.append({**own, "step": 0, "bytes_sent": sent, "density": 0.01, "skipped": False})
            epochs.append({**own, "epoch": 0, "step": 1.0, "accuracy": value, "metric": "accuracy"})
    tables = {"runs": pd.DataFrame(runs), "steps": pd.DataFrame(steps), "epochs": pd.DataFrame(epochs)}
    return Frames(**tables, settings=settings)


def only(*names: str) -> Frames:
    every = frames()
    tables = {kind: getattr(every, kind) for kind in ("runs", "steps", "epochs")}
    tables = {kind: rows[rows["run"].isin(names)] for kind, rows in tables.items()}
    return Frames(**tables, settings={run: every.settings[run] for run in names})


def test_a_form_is_named_by_what_is_not_usual() -> None:
    found = changes(frames().settings)
    assert found["micro-0"] == found["dense-1"] == {}
    assert found["micro fast-0"] == {"lr": "0.1"}
    assert found["steps-1"] == {"rounds.every": "1"}
    assert found["decay-0"] == {"feedback": "residual", "feedback.decay": "0.9"}
    assert found["clip-0"] == {"optimizer.clip_at": "update"}


def test_forms_stand_beside_dense_at_the_best_of_its_rates() -> None:
    rows = forms(form_rows(frames())).set_index(["sparsifier", "change", "rate"])
    dense = rows.loc[("dense", "", 0.01)]
    assert (dense["value"].round(9), dense["to_dense"]) == (0.65, 0)
    assert rows.index[0] == ("dense", "rounds.every=5", 0.01), "the best form comes first, though it is no baseline"
    steps = rows.loc[("micro", "rounds.every=1", 0.01)]
    assert abs(steps["to_dense"]) < 1e-9
    assert (steps["low"], steps["high"], steps["num_seeds"], steps["of_dense"]) == (0.6, 0.7, 2, 0.02)
    assert rows.loc[("micro", "optimizer.clip_at=update", 0.01), "to_dense"].round(9) == -0.25


def test_two_studies_in_one_folder_do_not_name_each_other() -> None:
    both, alone = forms(form_rows(frames("mlp", "gpt"))), forms(form_rows(frames()))
    assert len(both) == 2 * len(alone)
    assert set(both["change"]) == set(alone["change"])


def test_the_best_of_several_rates_names_their_number() -> None:
    best = tuned(forms(form_rows(frames()))).set_index("sparsifier")
    assert list(best.index) == ["dense", "micro"], "forms of one rate have nothing to choose"
    assert (best.loc["micro", "rate"], best.loc["micro", "trials"]) == (0.1, 2)
    assert best.loc["dense", "rate"] == 0.01


def test_table_and_figure_are_written(tmp_path: Path) -> None:
    names = {path.name for path in write_ablation(frames(), tmp_path)}
    assert {"ablation.md", "ablation.csv", "ablation-mlp-digits-n4.png"} <= names
    lines = (tmp_path / "ablation.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| MiCRO (rounds.every=1)"))
    assert [cell.strip() for cell in row.split("|")[2:10]] == [
        "0.01",
        "1",
        "2",
        "65.00 ± 5.00",
        "+0.00",
        "0.01",
        "20 B",
        "2 %",
    ]
    assert write_ablation(only("micro-0", "steps-0"), tmp_path) == []


def test_a_form_is_one_line_of_the_figure_with_rings_for_its_other_rates() -> None:
    rows = forms(form_rows(frames()))
    left = draw_forms(rows, metric_of(rows["metric"]), "Title").axes[0]
    names = [text.get_text() for text in left.get_yticklabels()]
    assert len(names) == len(rows[["sparsifier", "change"]].drop_duplicates()) < len(rows)
    assert "MiCRO, rate 0.1, best of 2" in names
    rings = [line for line in left.get_lines() if line.get_markerfacecolor() == "none" and len(line.get_xdata())]
    assert sorted(x for ring in rings for x in ring.get_xdata()) == pytest.approx([0.5, 0.55])


def test_every_row_says_how_many_rates_its_form_had() -> None:
    rows = forms(form_rows(frames())).set_index(["sparsifier", "change", "rate"])["trials"]
    assert [rows[("micro", "", rate)] for rate in (0.01, 0.1)] == [2, 2]
    assert rows[("micro", "rounds.every=1", 0.01)] == 1


def test_with_a_plan_a_form_has_the_same_name_however_few_are_at_hand() -> None:
    every = frames()
    few, plan = only("dense-0", "steps-0"), list(every.settings.values())
    assert changes(few.settings)["steps-0"] != {"rounds.every": "1"}, "of two forms none is usual"
    assert changes(few.settings, plan)["steps-0"] == {"rounds.every": "1"}
    other = {"run": MICRO | {"sparsifier.name": "new", "sparsifier.part": 1}}
    assert changes(other, plan)["run"] == {}, "a method that the plan has not is named by what is at hand"
    assert set(form_rows(few, plan)["change"]) == {"", "rounds.every=1"}


def test_rows_of_runs_that_are_gone_stay_and_seeds_of_two_machines_are_put_together(tmp_path: Path) -> None:
    plan = list(frames().settings.values())
    whole = write_ablation(frames(), tmp_path / "whole", plan=plan)
    first = only("dense-0", "dense-1", "steps-0", "clip-0", "clip-1")
    write_ablation(first, tmp_path, plan=plan)
    earlier = read(tmp_path / "ablation.csv", tmp_path / "ablation_runs.csv", TABLE)
    both = write_ablation(only("micro-0", "steps-1"), tmp_path / "new", plan=plan, earlier=earlier)
    assert {path.name for path in both} == {path.name for path in whole}
    found, of_all = (read_rows(folder) for folder in (tmp_path / "new", tmp_path / "whole"))
    assert len(found) == 4
    steps = ("micro", "rounds.every=1", 0.01)
    for key in ("num_seeds", "value", "low", "high", "to_dense", "of_dense"):
        assert found.loc[steps, key] == of_all.loc[steps, key], key
    assert found.loc[("micro", "", 0.01), "num_seeds"] == 1
    assert not found["is_earlier"].any(), "all runs are known, one by one"


def test_means_whose_runs_are_not_known_stay_until_as_many_seeds_are_at_hand(tmp_path: Path) -> None:
    plan = list(frames().settings.values())
    write_ablation(frames(), tmp_path, plan=plan)
    earlier = read(tmp_path / "ablation.csv", None, TABLE)
    write_ablation(only("micro-0", "steps-0", "steps-1"), tmp_path / "new", plan=plan, earlier=earlier)
    found, of_all = (read_rows(folder) for folder in (tmp_path / "new", tmp_path))
    assert found["num_seeds"].to_dict() == of_all["num_seeds"].to_dict()
    assert found["is_earlier"].groupby(level=[0, 1]).any().to_dict()[("micro", "rounds.every=1")] is False
    assert found["is_earlier"].sum() == len(found) - 1
    assert found["to_dense"].round(9).to_dict() == of_all["to_dense"].round(9).to_dict()
    text = (tmp_path / "new" / "ablation.md").read_text()
    assert f"{len(found) - 1} of {len(found)} rows are from an earlier table" in text
    assert forms(form_rows(frames("gpt"), plan), earlier.means)["model"].value_counts().to_dict()["mlp"] == len(found)


def read_rows(folder: Path) -> pd.DataFrame:
    """Return the rows of an ablation.csv by form."""
    return (
        read(folder / "ablation.csv", None, TABLE)
        .means.set_index(["sparsifier", "change", "rate"])
        .assign(is_earlier=pd.read_csv(folder / "ablation.csv")["is_earlier"].to_numpy())
    )


def test_a_plan_without_an_ablation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "ablation_gpt"]) == 2
    assert "--plan is for --ablation" in capsys.readouterr().err
