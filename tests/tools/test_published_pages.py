"""Pages of published runs: the committed ones are what the table gives; forms stand beside dense training."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from experiments.config.errors import UserError
from experiments.config.keys import flat
from experiments.reports.forms import forms, loss_curves
from experiments.reports.pages import Page, load_page, page_names, page_text, write_page
from experiments.reports.published_runs import changes, finished_rows
from experiments.reports.table import COLUMNS, FOLDER, OPTIONAL, add, read
from experiments.reports.tables import KINDS
from experiments.runs.records import read_records
from experiments.runs.run_folder import folder_of
from experiments.training.run import execute
from tests.legible import every_figure_is_legible
from tests.refusals import refused
from tests.tools.simulated_runs import IMAGES, configured

NAN = float("nan")
PUBLISHED = FOLDER.parent
TRAINING = {"model": "gpt", "dataset": "manuals_bytes", "world_size": 4, "epochs": 1}
USUAL = {"density": 0.01, "sparsifier": "micro", "form": "", "rate": 0.1, "metric": "accuracy", "kind": "run"}


def run(value: float, seed: int = 0, **columns: Any) -> dict[str, Any]:
    """Return a run of four steps and one epoch, with two evaluations."""
    given = dict.fromkeys(COLUMNS, "") | TRAINING | USUAL | {"studies": "study", "schema": "1", "num_seeds": 1}
    given |= {"seed": seed, "measured_density": 0.01, "compute_s": 0.1, "code": "ab12", **columns}
    for column in ("low", "high", "at_100mbit_s", "at_1gbit_s", *OPTIONAL):
        given[column] = columns.get(column, float("nan"))
    sent = 1000 if given["sparsifier"] == "dense" else 20
    config = {"batch_size": 4, "accumulate": 1, "dataset.sequence_length": 64}
    name = "-".join(str(given[key]) for key in ("sparsifier", "density", "form", "rate", "epochs", "seed", "kind"))
    points = [(NAN, 2, value / 2, sent / 2, 4), (1, 4, value, sent, 8)]
    return given | {"run": name, "config": json.dumps(config), "curve": points}


def table(*runs: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(runs, columns=COLUMNS)


DENSE = [run(0.6 + seed / 10, seed, sparsifier="dense", density=1.0) for seed in (0, 1)]
PAGE = Page(name="none", title="", studies=["nothing_*"], words="", tables=[])
SLOW_DENSE = run(0.4, sparsifier="dense", density=1.0, rate=0.2)


@pytest.mark.parametrize("name", page_names())
def test_a_committed_page_is_what_the_table_of_runs_gives(name: str) -> None:
    page = load_page(name)
    runs = page.runs(read())
    assert page_text(page, forms(runs), runs) == (PUBLISHED / f"{name}.md").read_text()


DRAWN = {figure.show: (name, figure) for name in page_names() for figure in load_page(name).figures}  # one of a kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWN)
def test_a_figure_of_each_kind_is_drawn_from_the_table(kind: str, tmp_path: Path) -> None:
    name, figure = DRAWN[kind]
    page = dataclasses.replace(load_page(name), figures=[figure])
    with every_figure_is_legible():
        written = {path.name for path in write_page(page, read(), tmp_path, tmp_path)}
    assert {f"{figure.file}.{suffix}" for suffix in ("png", "csv")} <= written


def of(rows: pd.DataFrame, method: str = "micro", rate: float = 0.1) -> Any:
    """Return the one row of a method at a rate."""
    (row,) = (row for _, row in rows.iterrows() if (row["sparsifier"], row["rate"]) == (method, rate))
    return row


def test_a_form_is_compared_with_dense_at_its_best_rate() -> None:
    diverged = run(0.4, sparsifier="dense", density=1.0, rate=0.4) | {
        "curve": [(NAN, 2, 0.2, 500, 4), (1, 4, NAN, 1000, 8)]
    }
    rows = forms(table(*DENSE, SLOW_DENSE, diverged, run(0.7), run(0.6, 1), run(0.8, rate=0.2)))
    micro = of(rows)
    assert (micro["num_seeds"], micro["low"], micro["high"], micro["of_dense"]) == (2, 0.6, 0.7, 0.02)
    assert abs(micro["to_dense"]) < 1e-9
    assert (micro["trials"], micro["total_bytes"], micro["batch_bytes"]) == (2, 20, 5)
    assert of(rows, "dense", 0.2)["to_dense"] == pytest.approx(-0.25)
    assert (micro["num_90"], micro["bytes_90"]) == (2, 20)
    assert micro["num_99"] == 1, "the other seed stays below 99 % of dense's 0.65"


def test_dense_training_that_exchanges_seldom_is_no_baseline() -> None:
    seldom = run(0.9, sparsifier="dense", density=1.0, form="gradients of 5 steps")
    assert of(forms(table(*DENSE, seldom, run(0.7))))["to_dense"] == pytest.approx(0.05)
    assert forms(table(seldom, run(0.7)))["to_dense"].isna().all()


def test_of_perplexity_less_is_better() -> None:
    own = {"metric": "perplexity"}
    micro = of(forms(table(run(10.0, sparsifier="dense", density=1.0, **own), run(11.0, **own))))
    assert (micro["to_dense"], micro["num_90"]) == (-1, 1)


def test_a_mean_of_runs_that_are_gone_stays_until_as_many_are_in_the_table() -> None:
    gone = run(0.5, kind="mean", num_seeds=2, low=0.4, high=0.6, reached="90,1,7,1")
    mean, own = (of(forms(table(*DENSE, gone, *(run(0.7, seed) for seed in range(count))))) for count in (1, 2))
    assert (mean["is_mean"], mean["value"], round(mean["half_range"], 9), mean["bytes_90"]) == (True, 0.5, 0.1, 7)
    assert (own["is_mean"], own["value"], own["num_seeds"]) == (False, 0.7, 2)


def test_seconds_on_a_link_are_computation_and_messages() -> None:
    messages = 8 * 2 * 3 * 50e-6  # eight collectives of 2 (n - 1) messages
    seconds = 4 * 0.1 + messages + 8 * 20 * 1514 / 1448 / 1e8
    assert of(forms(table(*DENSE, run(0.7))))["at_100mbit_s"] == pytest.approx(seconds)


@pytest.mark.parametrize("other", [{"model": "mlp"}, {"dataset": "digits"}, {"device": "cuda"}])
def test_seconds_on_a_link_take_the_computation_of_their_own_model_data_set_and_device(other: dict[str, Any]) -> None:
    faster = run(0.9, compute_s=0.001, rate=0.3, **other)
    if "device" in other:
        faster["config"] = json.dumps(json.loads(faster["config"]) | {"cluster.device": other["device"]})
    alone, beside = (of(forms(table(*DENSE, run(0.7), *more)))["at_1gbit_s"] for more in ((), (faster,)))
    assert beside == pytest.approx(alone)


def cells(kind: str, columns: list[str], *runs: dict[str, Any]) -> dict[str, list[str]]:
    """Return what a kind of table says of each method."""
    rows = KINDS[kind](forms(table(*DENSE, *runs)), columns)
    return {method: own for method, *own in rows.to_numpy().tolist()}


def test_the_smallest_density_that_keeps_up_is_named_with_what_fails_around_it() -> None:
    micro = [run(value, density=density) for density, value in {0.01: 0.5, 0.1: 0.645, 0.2: 0.63}.items()]
    cltk = [run(value, sparsifier="cltk", density=density) for density, value in ((0.1, 0.6), (0.2, 0.5))]
    found = cells("smallest", ["n", "measure"], *micro, *cltk, run(0.65, sparsifier="topk", density=0.1))
    assert found["MiCRO"] == ["0.1 (not at 0.2)", "1", "64.50", "0.01: -15.00 (n = 1)"]
    assert found["CLT-k"] == ["none tried", "", "", "0.1: -5.00 (n = 1)"]
    assert "Top-k" not in found, "one target says nothing of the smallest"


def test_rates_have_a_column_each_and_a_form_the_best_of_them() -> None:
    found = cells("across", ["method", "rate", "measure"], run(0.7), run(0.8, rate=0.2), run(0.6, rate=0.3))
    assert found["MiCRO"] == ["0.2", "80.00", "70.00", "80.00", "60.00"]
    assert found["Dense"][3:] == ["", ""], "rates that were not tried"


def test_steps_stand_beside_gradients_in_the_same_training() -> None:
    pairs = [run(value, form=form) for form, value in (("gradients", 0.5), ("each worker's own step", 0.7))]
    assert cells("pairs", ["method", "target"], *pairs) == {"MiCRO": ["0.01", "20.00"]}


def test_curves_have_every_evaluation_with_what_was_sent_until_then() -> None:
    own = loss_curves(table(run(3.0, metric="bits_per_byte")))
    assert own[["step", "tokens", "bytes"]].to_numpy().tolist() == [[2, 2048, 10], [4, 4096, 20]]


def test_runs_are_added_in_place_of_rows_of_their_name(tmp_path: Path) -> None:
    add(table(run(0.5), run(0.6, 1)), tmp_path)
    (path,) = add(table(run(0.9, 1), run(0.7, 2)), tmp_path)
    found = read(tmp_path)
    assert list(found["seed"]) == [0, 1, 2]
    assert list(forms(found)["high"]) == [0.9]
    text = path.read_text()
    add(found, tmp_path)
    assert path.read_text() == text


def test_seeds_of_a_form_differ_in_nothing_but_the_machine() -> None:
    def both(one: dict[str, Any], other: dict[str, Any]) -> pd.DataFrame:
        runs = (run(0.7, seed) | {"config": json.dumps(config)} for seed, config in enumerate((one, other)))
        return forms(table(*DENSE, *runs))

    refused(lambda: both({"batch_size": 4}, {"batch_size": 8}), "more than the seed", error=UserError)
    machines = ({"cluster": {"name": name, "nnodes": number}} for name, number in (("local", 1), ("nodes", 2)))
    assert of(both(*machines))["num_seeds"] == 2


@pytest.mark.parametrize("damage", [("curve", "kurve"), ('""batch_size"": 4', '""batch_size"": '), (",1,", ",9,")])
def test_a_file_that_is_no_table_of_runs_is_refused_by_name(damage: tuple[str, str], tmp_path: Path) -> None:
    (path,) = add(table(run(0.5)), tmp_path)
    path.write_text(path.read_text().replace(*damage))
    refused(lambda: read(tmp_path), path.name, error=UserError)


def test_a_page_without_runs_is_refused() -> None:
    refused(lambda: PAGE.runs(read()), "nothing_", error=UserError)


def test_a_form_is_named_by_what_is_not_usual_in_its_study() -> None:
    micro = {"sparsifier.name": "micro", "sparsifier.feedback": "residual", "lr": 0.01}
    decay = {"sparsifier.feedback.name": "residual", "sparsifier.feedback.decay": 0.9}
    dense, steps = micro | {"sparsifier.name": "dense"}, micro | {"rounds.every": 1}
    configs = {"usual": micro, "again": micro | {"seed": 1}, "dense": dense, "steps": steps}
    configs |= {"decay": {"sparsifier.name": "micro", "lr": 0.01} | decay, "fast": micro | {"lr": 0.1}}
    assert changes(configs) == {
        **{name: {} for name in ("usual", "again", "dense")},
        "steps": {"rounds.every": "1"},
        "decay": {"feedback": "residual", "feedback.decay": "0.9"},
        "fast": {"lr": "0.1"},
    }
    few = {"steps": steps, "dense": dense}
    assert changes(few)["steps"] != {"rounds.every": "1"}, "of two forms none is usual"
    assert changes(few, configs.values())["steps"] == {"rounds.every": "1"}, "the plan says what is"


def test_finished_runs_of_a_study_are_added_with_what_their_folders_say(tmp_path: Path) -> None:
    config = configured(tmp_path / "runs", *IMAGES, "sparsifier=topk", "epochs=2")
    execute(config)
    folder = folder_of(config)
    plan = {folder.path.name: flat(yaml.safe_load(folder.config_path.read_text()))}
    page = dataclasses.replace(PAGE, studies=["one", "two"])
    rows = finished_rows([tmp_path / "runs"], [page], {"one": plan, "two": plan, "three": plan})
    (row,) = rows.to_dict("records")
    assert (row["studies"], row["sparsifier"], row["metric"], row["num_seeds"]) == ("one two", "topk", "accuracy", 1)
    points = [point[2:4] for point in row["curve"]]
    ends, steps = read_records(folder.epochs_path), read_records(folder.steps_path)
    assert [point[0] for point in points] == pytest.approx([end["accuracy"] for end in ends])
    assert points[-1][1] == pytest.approx(sum(step["bytes_sent"] for step in steps))
    assert json.loads(row["config"])["epochs"] == 2
    (path,) = add(rows, tmp_path / "table")
    assert path.name == "one.csv"
    refused(lambda: finished_rows([tmp_path / "runs"], [page], {"three": plan}), "runs", error=UserError)
