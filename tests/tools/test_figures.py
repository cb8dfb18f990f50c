"""Figures and the summary come from run folders alone, say what the records say, and can be read."""

import io
import itertools
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from experiments import figures
from experiments.reports import frames
from experiments.reports.forms import forms_of
from experiments.reports.names import in_legend
from experiments.reports.pages import print_summary, summary_text
from experiments.reports.plot_style import BLACK, VERMILLION
from experiments.reports.run_figures import (
    convergence_numbers,
    density_numbers,
    draw_all,
    draw_times,
    throughput_numbers,
)
from tests.legible import every_figure_is_legible
from tests.refusals import refused
from tests.tools.study_folders import RULES, STAGES, TASKS, TRAITS, change_config, rows_of, write_rows, write_run
from tests.waiting import LIMIT_S

SUMMARY = {"summary.csv", "summary.md", "ends.csv"}
OF = "resnet18-cifar10-n8"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense, Top-k and the rules of MiCRO, two seeds each."""
    root = tmp_path_factory.mktemp("runs")
    for sparsifier, seed in itertools.product(("dense", "topk", *RULES), (0, 1)):
        write_run(root, sparsifier, seed)
    return root


@pytest.fixture(scope="module")
def drawn(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("figures") / "new" / "out"
    with every_figure_is_legible():
        assert figures.main(["--runs", str(study), "--out", str(out)]) == 0
    return out


def test_figures_do_not_depend_on_the_backend_that_is_set(study: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.figures", "--runs", str(study), "--out", str(tmp_path), "--table"]
    settings = {**os.environ, "MPLBACKEND": "nonesuch"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


def records(study: Path, method: str, kind: str) -> list[list[dict[str, Any]]]:
    """Return the rows of both seeds of a method."""
    return [rows_of(next(study.glob(f"{method}-*-s{seed}-*")) / f"{kind}.jsonl") for seed in (0, 1)]


def test_every_figure_is_written_with_its_numbers_and_the_runs_it_is_of(
    study: Path, drawn: Path, tmp_path: Path
) -> None:
    stems = [f"{name}-{OF}-d0.01" for name in ("convergence", "density", "time")]
    stems += [f"{name}-{OF}-e3" for name in ("methods", "bytes")]
    expected = {f"{stem}.{suffix}" for stem in stems for suffix in ("pdf", "png", "csv", "runs.txt")}
    assert {path.name for path in drawn.iterdir()} == expected | SUMMARY
    assert len((drawn / f"time-{OF}-d0.01.runs.txt").read_text().splitlines()) == 8
    draw_all(frames.load(study), tmp_path, ["density"])
    again = list(tmp_path.iterdir())
    assert len(again) == 4
    assert all(path.read_bytes() == (drawn / path.name).read_bytes() for path in again), "same runs give same bytes"


def test_numbers_of_figures_equal_the_records(study: Path, drawn: Path) -> None:
    table = pd.read_csv(drawn / f"convergence-{OF}-d0.01.csv")
    topk = table[table["sparsifier"] == "topk"]
    sent = [sum(row["bytes_sent"] for row in rows) for rows in records(study, "topk", "steps")]
    assert topk["total_bytes"].iloc[-1] == pytest.approx(statistics.mean(sent), rel=0.01)
    for (_, row), rows in zip(topk.iterrows(), zip(*records(study, "topk", "epochs"), strict=True), strict=True):
        ends = [row["accuracy"] for row in rows]
        expected = [2, rows[0]["step"], statistics.mean(ends), min(ends), max(ends)]
        assert list(row[["num_seeds", "step", "accuracy", "accuracy_min", "accuracy_max"]]) == pytest.approx(expected)
    times = pd.read_csv(drawn / f"time-{OF}-d0.01.csv").set_index("sparsifier").loc["micro"]
    medians = [
        1000
        * statistics.mean(
            statistics.median(row[stage] for row in rows[10:]) for rows in records(study, "micro", "steps")
        )
        for stage in STAGES
    ]
    assert list(times[[f"{stage}_ms" for stage in frames.STAGES]]) == pytest.approx(medians)
    density = pd.read_csv(drawn / f"density-{OF}-d0.01.csv")
    line = density[(density["sparsifier"] == "micro") & (density["seed"] == 1)]["density"]
    assert list(line) == pytest.approx([row["density"] for row in records(study, "micro", "steps")[1]])
    assert "dense" not in set(density["sparsifier"])


def test_the_summary_agrees_with_the_records_and_fits_a_terminal(study: Path, drawn: Path) -> None:
    rows = forms_of(frames.load(study))[1].set_index("sparsifier")
    ends = [rows[-1]["accuracy"] for rows in records(study, "topk", "epochs")]
    topk = rows.loc["topk"]
    expected = [2, statistics.mean(ends), min(ends), max(ends), (max(ends) - min(ends)) / 2]
    assert list(topk[["num_seeds", "value", "low", "high", "half_range"]]) == pytest.approx(expected)
    for column, key in {"measured_density": "density", "step_bytes": "bytes_sent", "imbalance": "imbalance"}.items():
        mean = statistics.mean(row[key] for run in records(study, "topk", "steps") for row in run)
        assert topk[column] == pytest.approx(mean), column
    assert topk["to_dense"] == pytest.approx(topk["value"] - rows.loc["dense", "value"])
    assert topk["total_s"] == pytest.approx(topk[["step_compute_s", "select_s", "exchange_s", "rest_s"]].sum())
    assert "## ResNet-18 on CIFAR-10, 8 workers, 3 epochs\n" in (drawn / "summary.md").read_text()
    console = Console(width=80, file=io.StringIO(), record=True)
    print_summary(frames.load(study), console)
    text = console.export_text()
    assert text.count("MiCRO, published") == 2
    assert "…" not in text


def test_a_run_in_place_of_its_folder_is_named_as_one(study: Path) -> None:
    run = next(study.iterdir())
    refused(f"figures --runs {run}", run, "itself a run", study)


def test_each_task_has_its_own_measure(tmp_path: Path) -> None:
    for task, sparsifier, seed in itertools.product(TASKS, ("dense", "micro"), (0, 1)):
        write_run(tmp_path, sparsifier, seed, task=task)
    loaded = frames.load(tmp_path)
    text = summary_text(loaded)
    assert {"accuracy %", "perplexity", "HR@10 %"} <= {cell.strip() for cell in text.replace("\n", "|").split("|")}
    assert "nan" not in text
    with every_figure_is_legible() as written:
        draw_all(loaded, tmp_path, ["convergence"])
    scales = {figure.axes[0].get_ylabel(): figure.axes[0].get_yscale() for figure in written}
    assert scales == {"test accuracy (%)": "linear", "test perplexity": "log", "hit rate at 10 (%)": "linear"}


def test_a_run_that_is_not_finite_is_not_averaged_away(tmp_path: Path) -> None:
    for sparsifier, seed in itertools.product(("dense", "micro"), (0, 1)):
        path = write_run(tmp_path, sparsifier, seed, task="text") / "epochs.jsonl"
    write_rows(path, [row | {"perplexity": None if row["epoch"] == 2 else 50.0} for row in rows_of(path)])
    loaded = frames.load(tmp_path)
    assert "not finite" in summary_text(loaded)
    numbers = convergence_numbers(loaded)
    assert list(numbers[numbers["sparsifier"] == "micro"]["perplexity"].isna()) == [False, False, True]


def test_long_runs_are_smoothed_and_thinned_and_skipped_steps_left_out(tmp_path: Path) -> None:
    for seed in (0, 1):
        path = write_run(tmp_path, "micro", seed, per_epoch=300) / "steps.jsonl"
        rows = rows_of(path)
        rows[seed + 1] |= {"skipped": True, "density": 0.0, "loss": None}
        write_rows(path, rows)
    numbers = density_numbers(frames.load(tmp_path).steps)
    assert set(numbers.groupby("step").size()) == {2}, "the same steps of every seed"
    middle = numbers.set_index(["seed", "step"]).loc[(1, 450), "density"]
    assert middle == pytest.approx(statistics.median(row["density"] for row in rows[446:455]))
    applied = forms_of(frames.load(tmp_path, {"seed": ["1"]}))[1]["measured_density"][0]
    assert applied == pytest.approx(statistics.mean(row["density"] for row in rows if not row["skipped"]))


def test_local_steps_have_a_density_at_the_end_of_a_round_and_their_share_of_the_exchange(tmp_path: Path) -> None:
    for world_size, every in ((2, 1), (4, 7)):
        path = write_run(tmp_path, "micro", world_size=world_size, per_epoch=300) / "steps.jsonl"
        rows = rows_of(path)
        for row in rows:
            row |= {"compute_s": 0.04, "select_s": 0.0, "rest_s": 0.0, "exchange_s": 0.0}
            if row["step"] % every == every - 1:
                row |= {"exchange_s": 0.005, "round": row["step"] // every, "fragment": 0}
            else:
                row |= dict.fromkeys(("density", "target_density", "density_error"))
        write_rows(path, rows)
    loaded = frames.load(tmp_path)
    found = forms_of(loaded)[1].set_index("world_size")["exchange_s"]
    assert found.to_dict() == pytest.approx({2: 0.005, 4: 0.005 / 7})
    assert throughput_numbers(loaded).set_index("world_size")["efficiency"][4] == pytest.approx(45 / (40 + 5 / 7))
    steps = density_numbers(loaded.steps[loaded.steps["world_size"] == 4])["step"]
    assert {step % 7 for step in steps} == {6}


def test_throughput_counts_samples_of_real_workers_a_line_for_each_density(tmp_path: Path) -> None:
    for world_size, density in itertools.product((2, 4), (0.01, 0.1)):
        write_run(tmp_path / "runs", "topk", world_size=world_size, density=density)
    numbers = throughput_numbers(frames.load(tmp_path / "runs"))
    row = numbers[(numbers["asked_density"] == 0.01) & (numbers["world_size"] == 4)].iloc[0]
    assert row["samples_per_s"] == pytest.approx(4 * 32 / (sum(TRAITS["topk"][2]) / 1000), rel=0.2)
    assert row["efficiency"] == pytest.approx(1, rel=0.05)
    with every_figure_is_legible() as written:
        draw_all(frames.load(tmp_path / "runs"), tmp_path / "out", ["throughput"])
    names = [text.get_text() for text in written[0].legends[0].get_texts()]
    assert names == ["Top-k, 0.01 (n=1)", "Top-k, 0.1 (n=1)", "linear"]


def test_forms_that_differ_in_a_list_or_twice_in_a_choice_have_different_names(tmp_path: Path) -> None:
    others: tuple[dict[str, Any], ...] = (
        {"optimizer": {"name": "sgd", "momentum": 0.9}},
        {"optimizer": {"name": "sgd", "momentum": 0.0}, "lr_milestones": [1, 2]},
        {"optimizer": {"name": "adam", "betas": [0.9, 0.99]}, "note": "of many words, " * 8},
    )
    for number, changes in enumerate(others):
        change_config(write_run(tmp_path / "runs", "micro", number), seed=0, **changes)
    loaded = frames.load(tmp_path / "runs")
    assert loaded.runs["variant"].nunique() == 3
    assert len(frames.load(tmp_path / "runs", {"note": ["null"]}).runs) == 2
    with every_figure_is_legible(), warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_all(loaded, tmp_path / "out", ["methods", "bytes", "density", "time"])
    console = Console(width=120, file=io.StringIO())
    print_summary(loaded, console)
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_each_form_has_its_own_target(tmp_path: Path) -> None:
    for number, density in enumerate((0.01, 0.1)):
        path = write_run(tmp_path, "micro", number, density=density)
        change_config(path, density=0.01, epochs=3, seed=0, density_warmup={"steps": number})
    with every_figure_is_legible() as written:
        draw_all(frames.load(tmp_path), tmp_path / "out", ["density"])
    targets = [line.get_ydata() for line in written[0].axes[0].lines if line.get_zorder() == 1.5]
    assert [set(target) for target in targets] == [{0.01}, {0.1}]  # type: ignore[arg-type]


def test_a_dense_run_is_shown_with_every_density_and_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = ("topk", "micro", "cltk", "threshold")
    for density, method in itertools.product((0.1, 0.01), ("dense", *sparse)):
        write_run(tmp_path / "runs", method, density=density)
    with every_figure_is_legible() as written:
        assert figures.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "same experiment and seed as dense-d0.01" in capsys.readouterr().out
    numbers = pd.read_csv(tmp_path / "out" / f"densities-{OF}-e3.csv")
    assert numbers.groupby("sparsifier").size().to_dict() == {"dense": 1, **dict.fromkeys(sparse, 2)}
    for density in ("0.01", "0.1"):
        numbers = pd.read_csv(tmp_path / "out" / f"convergence-{OF}-d{density}.csv")
        assert set(numbers["sparsifier"]) == {"dense", *sparse}
    entries = zip(written[0].legends[0].get_texts(), written[0].legends[0].legend_handles, strict=True)
    colours = {text.get_text().partition(" (n")[0]: handle.get_color() for text, handle in entries}  # type: ignore[attr-defined]
    assert len(set(colours.values())) == len(colours) == 5, "no two methods have one colour"
    assert (colours["Dense"], colours[in_legend("micro")]) == (BLACK, VERMILLION)
    selected = frames.load(tmp_path / "runs", {"density": ["0.1"], "sparsifier": ["dense", "topk"]}).runs
    assert sorted(zip(selected["sparsifier"], selected["density"], strict=True)) == [("dense", 1.0), ("topk", 0.1)]


def test_a_step_is_split_into_forward_and_backward_and_has_the_range_of_its_seeds() -> None:
    row = {"variant": "", "num_seeds": 2, "select_ms": 0.0, "exchange_ms": 6.0, "rest_ms": 1.0, "total_ms": 17.0}
    row |= {"compute_ms": 10.0, "forward_ms": 4.0, "total_ms_min": 15.0}
    ends = {"topk": 18.0, "dense": 21.0}
    rows = [row | {"sparsifier": name, "total_ms_max": most} for name, most in ends.items()]
    figure = draw_times(pd.DataFrame(rows), "times")
    (axes,), (legend,) = figure.axes, figure.legends
    spans = [(line[0][0], line[1][0]) for line in axes.collections[0].get_segments()]
    assert spans == [(15, 21), (15, 18)], "dense stands first"
    assert [bar.get_width() for bar in axes.patches[::2]] == [4, 6, 0, 6, 1]
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "backward", "select", "exchange", "rest"]
