"""Figures and tables come from run folders alone, and say what the records say."""

import io
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import yaml
from rich.console import Console

from experiments import figures
from experiments.harness import frames, tables
from experiments.harness.drawing import draw_rules
from experiments.harness.errors import UserError
from experiments.harness.plotting import LOOKS, look, style

Row = dict[str, Any]
NUMEL = 270_000
RULES = {"micro": "agreed", "micro_published": "published", "micro_repaired": "repaired"}
# build-up, scatter of the density, and milliseconds of compute, select, exchange, rest
TRAITS: dict[str, tuple[float, float, tuple[float, ...]]] = {
    "dense": (1.0, 0.0, (41.0, 0.0, 62.0, 3.1)),
    "topk": (5.8, 0.02, (41.2, 18.5, 11.3, 4.0)),
    "cltk": (1.0, 0.0, (41.1, 19.0, 5.2, 3.7)),
    "threshold": (2.6, 0.3, (40.8, 2.1, 7.9, 3.8)),
    "randomk": (1.0, 0.001, (41.0, 3.3, 5.1, 3.8)),
    "micro": (1.0, 0.08, (41.0, 0.7, 4.9, 3.6)),
    "micro_published": (0.85, 0.12, (41.0, 0.7, 4.8, 3.6)),
    "micro_repaired": (1.0, 0.1, (41.0, 0.7, 4.9, 3.6)),
}


def write_run(
    root: Path,
    sparsifier: str,
    seed: int = 0,
    *,
    density: float = 0.01,
    epochs: int = 3,
    per_epoch: int = 20,
    lr: float = 0.1,
) -> Path:
    """Write the folder of a finished run with rows such as training writes."""
    folder = root / (f"{sparsifier}-d{density:g}-s{seed}" + (f"-lr{lr:g}" if lr != 0.1 else ""))
    folder.mkdir(parents=True)
    config = {
        "model": {"name": "resnet18"},
        "dataset": {"name": "cifar10"},
        "sparsifier": {"name": sparsifier, "selector": {"rule": RULES.get(sparsifier)}},
        "cluster": {"name": "local", "world_size": 8},
        "density": density,
        "seed": seed,
        "epochs": epochs,
        "batch_size": 32,
        "optimizer": {"lr": lr},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rng = np.random.default_rng([seed, list(TRAITS).index(sparsifier)])
    steps = _step_rows(rng, sparsifier, density, epochs * per_epoch, per_epoch)
    _write_rows(folder / "steps.jsonl", steps)
    _write_rows(folder / "epochs.jsonl", _epoch_rows(rng, sparsifier, steps, per_epoch))
    (folder / "DONE").write_text("{}")
    return folder


def _step_rows(rng: np.random.Generator, sparsifier: str, density: float, num_steps: int, per_epoch: int) -> list[Row]:
    build_up, scatter, stages = TRAITS[sparsifier]
    rows, clock, target = [], 0.0, 1.0 if sparsifier == "dense" else density
    for step in range(num_steps):
        settle = 1 + 2.5 * math.exp(-step / (0.05 * num_steps)) * (scatter > 0.05)
        measured = min(1.0, round(NUMEL * target * build_up * settle * math.exp(scatter * rng.normal())) / NUMEL)
        seconds = [1e-3 * ms * (1 + 0.1 * abs(rng.normal()) + 3 * (step == 0)) for ms in stages]
        clock += sum(seconds)
        rows.append(
            {
                "step": step,
                "epoch": step // per_epoch,
                "loss": 2.3 * math.exp(-step / num_steps),
                "lr": 0.1,
                "rule": RULES.get(sparsifier),
                "target_density": target,
                "density": measured,
                "local_density": measured / build_up,
                "density_error": abs(measured / target - 1),
                "build_up": build_up,
                "imbalance": 0.2,
                "threshold": 0.02 * (1 - math.exp(-(step + 1) / 20)) if sparsifier in RULES else None,
                "bytes_sent": int(8 * NUMEL * measured),
                "counts_bytes": 32,
                "indices_bytes": int(4 * NUMEL * measured),
                "values_bytes": int(4 * NUMEL * measured),
                **dict(zip(("compute_s", "select_s", "exchange_s", "rest_s"), seconds, strict=True)),
                "step_s": sum(seconds),
                "time_s": clock,
                "skipped": False,
            }
        )
    return rows


def _epoch_rows(rng: np.random.Generator, sparsifier: str, steps: list[Row], per_epoch: int) -> Iterator[Row]:
    ends = steps[per_epoch - 1 :: per_epoch]
    best = 0.93 - 0.01 * list(TRAITS).index(sparsifier)
    for epoch, last in enumerate(ends):
        accuracy = best * (1 - 0.8 * math.exp(-5 * (epoch + 1) / len(ends))) + 0.008 * rng.normal()
        yield {
            "epoch": epoch,
            "step": last["step"] + 1,
            "time_s": last["time_s"],
            "train_loss": last["loss"],
            "test_loss": last["loss"] + 0.1,
            "accuracy": accuracy,
            "num_samples": 10_000,
        }


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense, Top-k and the rules of MiCRO, two seeds each."""
    root = tmp_path_factory.mktemp("runs")
    for sparsifier in ("dense", "topk", *RULES):
        for seed in (0, 1):
            write_run(root, sparsifier, seed)
    return root


@pytest.fixture(scope="module")
def drawn(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("figures")
    assert figures.main(["--runs", str(study), "--out", str(out)]) == 0
    return out


def test_every_figure_is_written_with_its_numbers(drawn: Path) -> None:
    names = ["convergence", "density", "rules-micro", "time"]
    group = "resnet18-cifar10-n8-d0.01"
    stems = [*(f"{name}-{group}" for name in names), "methods-resnet18-cifar10-n8"]
    expected = {f"{stem}.{suffix}" for stem in stems for suffix in ("pdf", "png", "csv")}
    assert {path.name for path in drawn.iterdir()} == expected | {"summary.csv", "summary.md"}


def test_drawing_twice_gives_the_same_bytes(study: Path, drawn: Path, tmp_path: Path) -> None:
    figures.main(["--runs", str(study), "--out", str(tmp_path)])
    for path in drawn.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_convergence_numbers_are_those_of_the_records(study: Path, drawn: Path) -> None:
    table = pd.read_csv(drawn / "convergence-resnet18-cifar10-n8-d0.01.csv")
    records = [_rows(study / f"topk-d0.01-s{seed}" / "epochs.jsonl") for seed in (0, 1)]
    topk = table[table["sparsifier"] == "topk"]
    for (_, drawn_row), rows in zip(topk.iterrows(), zip(*records, strict=True), strict=True):
        accuracies = [row["accuracy"] for row in rows]
        assert drawn_row["num_seeds"] == 2
        assert drawn_row["step"] == rows[0]["step"]
        assert drawn_row["accuracy"] == pytest.approx(statistics.mean(accuracies))
        assert (drawn_row["accuracy_min"], drawn_row["accuracy_max"]) == pytest.approx(
            (min(accuracies), max(accuracies))
        )
        assert drawn_row["time_s"] == pytest.approx(statistics.mean(row["time_s"] for row in rows))


def test_time_numbers_are_medians_without_the_first_steps(study: Path, drawn: Path) -> None:
    table = pd.read_csv(drawn / "time-resnet18-cifar10-n8-d0.01.csv").set_index("sparsifier")
    expected = []
    for stage in frames.STAGES:
        rows = [_rows(study / f"micro-d0.01-s{seed}" / "steps.jsonl")[10:] for seed in (0, 1)]
        expected.append(1000 * statistics.mean(statistics.median(row[f"{stage}_s"] for row in run) for run in rows))
    assert list(table.loc["micro", [f"{stage}_ms" for stage in frames.STAGES]]) == pytest.approx(expected)
    assert table.loc["micro", "total_ms"] == pytest.approx(sum(expected))


def test_density_numbers_of_a_short_run_are_the_raw_ones(study: Path, drawn: Path) -> None:
    table = pd.read_csv(drawn / "density-resnet18-cifar10-n8-d0.01.csv")
    line = table[(table["sparsifier"] == "micro") & (table["seed"] == 1)]
    rows = _rows(study / "micro-d0.01-s1" / "steps.jsonl")
    assert list(line["density"]) == pytest.approx([row["density"] for row in rows])
    assert list(line["density_error"]) == pytest.approx([row["density_error"] for row in rows], abs=1e-7)
    assert "dense" not in set(table["sparsifier"])


def test_rules_stand_side_by_side(study: Path, drawn: Path) -> None:
    table = pd.read_csv(drawn / "rules-micro-resnet18-cifar10-n8-d0.01.csv")
    for sparsifier, rule in RULES.items():
        line = table[(table["rule"] == rule) & (table["stream"] == "seed 0")]
        rows = _rows(study / f"{sparsifier}-d0.01-s0" / "steps.jsonl")
        assert list(line["threshold"]) == pytest.approx([row["threshold"] for row in rows])


def test_rules_can_be_drawn_of_any_stream(tmp_path: Path) -> None:
    rows = itertools.product(("agreed", "published"), ("steady", "drifting"), range(5))
    frame = pd.DataFrame(rows, columns=["rule", "stream", "step"])
    frame = frame.assign(density=0.01 + 0.001 * frame["step"], target_density=0.01, threshold=None)
    figure = draw_rules(frame, "Rules")
    assert [axes.get_title() for axes in figure.axes] == ["published", "agreed"]  # and no empty row of thresholds
    assert all(len(axes.get_lines()) == 3 for axes in figure.axes)


def test_long_runs_are_smoothed_and_thinned(tmp_path: Path) -> None:
    write_run(tmp_path, "micro", epochs=3, per_epoch=300)
    numbers = figures.density_numbers(frames.steps(tmp_path))
    raw = [row["density"] for row in _rows(tmp_path / "micro-d0.01-s0" / "steps.jsonl")]
    assert list(numbers["step"]) == list(range(0, 900, 3))
    middle = numbers.set_index("step").loc[450, "density"]
    assert middle == pytest.approx(statistics.median(raw[446:455]))


def test_summary_agrees_with_the_records(study: Path) -> None:
    table = tables.summary(study).set_index("sparsifier")
    finals = [_rows(study / f"topk-d0.01-s{seed}" / "epochs.jsonl")[-1]["accuracy"] for seed in (0, 1)]
    steps = [_rows(study / f"topk-d0.01-s{seed}" / "steps.jsonl") for seed in (0, 1)]

    def mean(key: str) -> float:
        return statistics.mean(statistics.mean(row[key] for row in run) for run in steps)

    topk = table.loc["topk"]
    assert topk["num_seeds"] == 2
    assert topk["accuracy"] == pytest.approx(statistics.mean(finals))
    assert topk["accuracy_half_range"] == pytest.approx((max(finals) - min(finals)) / 2)
    assert topk["measured_density"] == pytest.approx(mean("density"))
    assert topk["target_density"] == pytest.approx(mean("target_density"))
    for key in ("density_error", "build_up", "imbalance", "bytes_sent"):
        assert topk[key] == pytest.approx(mean(key)), key
    assert table.index[0] == "dense"


def test_table_fits_eighty_characters_and_names_every_method(study: Path) -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    tables.print_summary(study, console)
    text = console.export_text()
    assert all(LOOKS[name].name in text for name in ("dense", "topk", *RULES))
    assert "…" not in text


def test_markdown_has_a_row_per_method(drawn: Path) -> None:
    text = (drawn / "summary.md").read_text()
    assert text.startswith("## ResNet-18 on CIFAR-10, 8 workers\n")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 5
    assert len({line.count("|") for line in lines}) == 1


def test_table_only_draws_nothing(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--runs", str(study), "--out", str(tmp_path), "--table"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"summary.csv", "summary.md"}
    assert "Top-k" in capsys.readouterr().out


def test_unfinished_runs_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "topk")
    (write_run(tmp_path, "micro") / "DONE").unlink()
    failed = write_run(tmp_path, "cltk")
    (failed / "DONE").unlink()
    (failed / "failure.json").write_text("{}")
    assert list(frames.runs(tmp_path)["sparsifier"]) == ["topk"]
    out = capsys.readouterr().out
    assert out == "left out, not finished: cltk-d0.01-s0 (failed), micro-d0.01-s0\n"


def test_a_torn_last_line_is_tolerated(tmp_path: Path) -> None:
    path = write_run(tmp_path, "topk") / "steps.jsonl"
    path.write_text(path.read_text()[:-9])
    assert list(frames.steps(tmp_path)["step"]) == list(range(59))


@pytest.mark.parametrize("num_unfinished", [0, 1])
def test_nothing_finished_is_one_line_and_exit_code_1(
    num_unfinished: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(num_unfinished):
        (write_run(tmp_path, "topk", seed) / "DONE").unlink()
    assert figures.main(["--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "no finished run" in message
    assert "python -m experiments.train" in message
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_line(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert figures.main(["--runs", str(study), "--out", str(tmp_path / "file" / "out"), "--table"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_empty_record_is_named(tmp_path: Path) -> None:
    (write_run(tmp_path, "topk") / "epochs.jsonl").write_text("")
    with pytest.raises(UserError, match=r"epochs\.jsonl has no rows"):
        frames.load(tmp_path)


def test_runs_that_differ_in_more_than_the_seed_are_never_averaged(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            write_run(tmp_path, "topk", seed, lr=rate)
    table = tables.summary(tmp_path)
    assert list(table["variant"]) == ["lr=0.1", "lr=0.2"]
    assert list(table["num_seeds"]) == [2, 2]


def test_a_dense_run_belongs_to_every_density_and_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for density in (0.1, 0.01):
        write_run(tmp_path, "dense", density=density)
        write_run(tmp_path, "topk", density=density)
    loaded = frames.load(tmp_path)
    assert [list(group.frames.runs["sparsifier"]) for group in figures.groups(loaded)] == [["dense", "topk"]] * 2
    assert "same experiment and seed as dense-d0.01-s0: dense-d0.1-s0" in capsys.readouterr().out
    selected = frames.load(tmp_path, {"density": ["0.1"]}).runs
    assert sorted(zip(selected["sparsifier"], selected["density"], strict=True)) == [("dense", 1.0), ("topk", 0.1)]


def test_selection(study: Path) -> None:
    chosen = frames.load(study, frames.parse_selection(["sparsifier=topk,micro", "model.name=ResNet18", "seed=1"])).runs
    assert sorted(chosen["run"]) == ["micro-d0.01-s1", "topk-d0.01-s1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["densty=0.1"], "no run has the key 'densty'; did you mean 'density'?"),
        (["seed=7"], "--select seed=7 fits no run; present: 0, 1"),
        (["seed"], "--select takes key=value or key=value,value, got 'seed'"),
    ],
)
def test_a_wrong_selection_is_explained(
    words: list[str], message: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main(["--runs", str(study), "--select", *words]) == 1
    assert capsys.readouterr().err.strip() == message


def test_thinning_keeps_the_same_steps_of_every_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        path = write_run(tmp_path, "micro", seed, per_epoch=300) / "steps.jsonl"
        rows = _rows(path)
        rows[seed + 1]["skipped"] = True
        _write_rows(path, rows)
    numbers = figures.density_numbers(frames.steps(tmp_path))
    assert set(numbers.groupby("step").size()) == {2}


def test_skipped_steps_are_in_no_curve(tmp_path: Path) -> None:
    path = write_run(tmp_path, "micro") / "steps.jsonl"
    rows = _rows(path)
    rows[30] |= {"skipped": True, "density": 0.0, "loss": None}
    _write_rows(path, rows)
    numbers = figures.density_numbers(frames.steps(tmp_path))
    assert 30 not in set(numbers["step"])
    assert tables.summary(tmp_path)["measured_density"][0] == pytest.approx(
        statistics.mean(row["density"] for row in rows if not row["skipped"])
    )


def test_every_method_has_its_own_look_and_unknown_ones_a_stable_one() -> None:
    looks = {(method.color, method.dashes, method.marker) for method in LOOKS.values()}
    assert len(looks) == len(LOOKS)
    assert look("my_method") == look("my_method")
    assert look("my_method").name == "my_method"


def test_style_does_not_leak_into_the_callers_settings(tmp_path: Path) -> None:
    matplotlib.rcParams["font.size"] = 13
    try:
        with style():
            assert matplotlib.rcParams["font.size"] == 8
        assert matplotlib.rcParams["font.size"] == 13
    finally:
        matplotlib.rcParams["font.size"] = matplotlib.rcParamsDefault["font.size"]
