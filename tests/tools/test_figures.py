"""Figures and tables come from run folders alone, and say what the records say."""

import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from rich.console import Console

from experiments import figures
from experiments.config.errors import UserError
from experiments.config.units import three_digits
from experiments.reports import frames, tables
from experiments.reports.all_figures import draw_all, groups
from experiments.reports.figure_numbers import convergence_numbers, density_numbers, throughput_numbers
from experiments.reports.figure_parts import NUM_COLOURS, new_figure, save
from experiments.reports.measures import METRICS, in_words, metric_of
from experiments.reports.method_curves import GREY_LINE, leading
from experiments.reports.method_figure import draw_methods
from experiments.reports.names import label
from experiments.reports.plot_style import BLACK, VERMILLION, style
from experiments.reports.rule_figure import draw_rules
from experiments.reports.run_configs import parse_selection
from experiments.reports.speed_figures import draw_throughput
from experiments.reports.step_figures import draw_convergence
from experiments.reports.summary import of_study, summarise, summary
from experiments.runs.run_folder import RunFolder
from tests.finished_runs import finished

Row = dict[str, Any]
NUMEL = 270_000
TABLES = {"summary.csv", "summary.md", "reached.csv", "reached.md"}
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


@dataclass(frozen=True)
class Study:
    """Runs of one task: what they train, and the measures of an epoch in which they got so far, from 0 to 1."""

    model: str
    dataset: str
    suffix: str
    measures: Callable[[float], Row]


STUDIES = {
    "images": Study("resnet18", "cifar10", "", lambda share: {"test_loss": 1 - share, "accuracy": share}),
    "text": Study(
        *("lstm", "wikitext2", "-text"),
        lambda share: {"test_loss": 9 - 5 * share, "perplexity": math.exp(9 - 5 * share)},
    ),
    "interactions": Study("neumf", "latent", "-pairs", lambda share: {"hit_rate": 0.7 * share, "ndcg": 0.4 * share}),
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
    task: str = "images",
    world_size: int = 8,
) -> Path:
    """Write the folder of a finished run with rows such as training writes."""
    folder = root / (f"{sparsifier}-d{density:g}-s{seed}" + (f"-lr{lr:g}" if lr != 0.1 else "") + STUDIES[task].suffix)
    folder.mkdir(parents=True)
    config = {
        "model": {"name": STUDIES[task].model},
        "dataset": {"name": STUDIES[task].dataset},
        "sparsifier": {"name": sparsifier, "selector": {"rule": RULES.get(sparsifier)}},
        "cluster": {"name": "local", "world_size": world_size},
        "density": density,
        "seed": seed,
        "epochs": epochs,
        "batch_size": 32,
        "optimizer": {"lr": lr},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rng = np.random.default_rng([seed, list(TRAITS).index(sparsifier)])
    steps = _step_rows(rng, sparsifier, density, epochs * per_epoch, per_epoch, sends=world_size > 1)
    _write_rows(folder / "steps.jsonl", steps)
    _write_rows(folder / "epochs.jsonl", _epoch_rows(rng, sparsifier, steps, per_epoch, STUDIES[task]))
    (folder / "DONE").write_text(json.dumps({"step": epochs * per_epoch, "epoch": epochs - 1}))
    return finished(RunFolder(folder)).path


def _step_rows(
    rng: np.random.Generator, sparsifier: str, density: float, num_steps: int, per_epoch: int, *, sends: bool
) -> list[Row]:
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
                "bytes_sent": int(8 * NUMEL * measured) * sends,
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


def _epoch_rows(
    rng: np.random.Generator, sparsifier: str, steps: list[Row], per_epoch: int, study: Study
) -> Iterator[Row]:
    ends = steps[per_epoch - 1 :: per_epoch]
    best = 0.93 - 0.01 * list(TRAITS).index(sparsifier)
    for epoch, last in enumerate(ends):
        share = best * (1 - 0.8 * math.exp(-5 * (epoch + 1) / len(ends))) + 0.008 * rng.normal()
        yield {
            "epoch": epoch,
            "step": last["step"] + 1,
            "time_s": last["time_s"],
            "train_loss": last["loss"],
            "num_samples": 10_000,
            **study.measures(share),
        }


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a record; of a finished run, DONE too."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = RunFolder(path.parent)
    if folder.is_done():
        finished(folder)


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
    out = tmp_path_factory.mktemp("figures") / "new" / "out"
    assert figures.main(["--runs", str(study), "--out", str(out)]) == 0
    return out


def test_every_figure_is_written_with_its_numbers(drawn: Path) -> None:
    names = ["convergence", "density", "rules-micro", "time"]
    group = "resnet18-cifar10-n8-d0.01"
    stems = [*(f"{name}-{group}" for name in names), "methods-resnet18-cifar10-n8"]
    stems.append("bytes-resnet18-cifar10-n8-e3")
    expected = {f"{stem}.{suffix}" for stem in stems for suffix in ("pdf", "png", "csv", "runs.txt")}
    assert {path.name for path in drawn.iterdir()} == expected | TABLES


@pytest.mark.parametrize(
    ("cluster", "num_methods"),
    [({"name": "nodes", "nnodes": 4, "nproc_per_node": 2}, 1), ({"device": "cuda"}, 2), ({"name": "simulated"}, 2)],
)
def test_runs_on_other_machines_are_seeds_of_one_method(
    cluster: dict[str, Any], num_methods: int, tmp_path: Path
) -> None:
    write_run(tmp_path, "topk", 0)
    path = write_run(tmp_path, "topk", 1) / "config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config | {"cluster": config["cluster"] | cluster}))
    finished(RunFolder(path.parent))
    assert frames.runs(tmp_path)["variant"].nunique() == num_methods


@pytest.mark.parametrize(("content", "num_methods"), [("a", 1), ("b", 2)])
def test_runs_on_other_files_are_not_seeds_of_one_method(content: str, num_methods: int, tmp_path: Path) -> None:
    for seed, sha256 in enumerate(["a", content]):
        folder = write_run(tmp_path, "topk", seed)
        (folder / "manifest.json").write_text(json.dumps({"data_checksums": {"train": sha256}}))
        finished(RunFolder(folder))
    assert frames.runs(tmp_path)["variant"].nunique() == num_methods


def test_runs_of_several_folders_are_drawn_together(study: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "more", "cltk", 0)
    write_run(tmp_path / "more", "topk", 0)  # which the study has too
    both = frames.load([study, tmp_path / "more"])
    assert set(both.runs["run"]) == set(frames.load(study).runs["run"]) | {"cltk-d0.01-s0"}
    words = ["--runs", str(study), "--runs", str(tmp_path / "more"), "--table", "--out", str(tmp_path / "out")]
    assert figures.main(words) == 0
    assert "CLT-k" in (tmp_path / "out" / "summary.md").read_text()


def test_a_figure_names_the_runs_it_comes_from(drawn: Path) -> None:
    runs = (drawn / "rules-micro-resnet18-cifar10-n8-d0.01.runs.txt").read_text().splitlines()
    assert {"dense-d0.01-s0", "topk-d0.01-s1", "micro_published-d0.01-s0"} <= set(runs)


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


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of each task in one folder, two seeds each."""
    root = tmp_path_factory.mktemp("mixed")
    for task, sparsifier, seed in itertools.product(STUDIES, ("dense", "micro"), (0, 1)):
        write_run(root, sparsifier, seed, task=task)
    return root


def test_a_study_is_drawn_with_its_own_measure(mixed: Path) -> None:
    by_model = {group.model: group for group in groups(frames.load(mixed))}
    measures = {model: group.metric.key for model, group in by_model.items()}
    assert measures == {"resnet18": "accuracy", "lstm": "perplexity", "neumf": "hit_rate"}
    for group in by_model.values():
        numbers = convergence_numbers(group.frames, group.metric)
        figure = draw_convergence(numbers, group.metric, group.title)
        assert figure.axes[0].get_ylabel() == group.metric.label
        expected = "linear" if group.metric.higher_is_better else "log"
        assert {axes.get_yscale() for axes in figure.axes} == {expected}
        for axes in figure.axes:
            drawn = [value for line in axes.get_lines() for value in line.get_ydata()]
            assert sorted(drawn) == sorted(numbers[group.metric.key])


@pytest.mark.parametrize(("task", "key"), [("text", "perplexity"), ("interactions", "hit_rate")])
def test_numbers_of_a_measure_are_those_of_the_records(mixed: Path, task: str, key: str) -> None:
    loaded = frames.load(mixed, {"model": [STUDIES[task].model]})
    folders = [mixed / f"micro-d0.01-s{seed}{STUDIES[task].suffix}" for seed in (0, 1)]
    ends = [[row[key] for row in _rows(folder / "epochs.jsonl")] for folder in folders]
    numbers = convergence_numbers(loaded, metric_of([key]))
    line = numbers[numbers["sparsifier"] == "micro"]
    assert list(line[key]) == pytest.approx([statistics.mean(pair) for pair in zip(*ends, strict=True)])
    assert list(line[f"{key}_min"]) == pytest.approx([min(pair) for pair in zip(*ends, strict=True)])
    assert list(line[f"{key}_max"]) == pytest.approx([max(pair) for pair in zip(*ends, strict=True)])
    row = summarise(loaded).set_index("sparsifier").loc["micro"]
    assert row["metric"] == key
    assert row[key] == pytest.approx(statistics.mean(run[-1] for run in ends))
    assert "accuracy" not in row


def test_bytes_of_an_epoch_are_those_of_all_steps_until_then(study: Path) -> None:
    path = study / "topk-d0.01-s0" / "steps.jsonl"
    sent = list(itertools.accumulate(row["bytes_sent"] for row in _rows(path)))
    loaded = frames.load(study, {"sparsifier": ["topk"], "seed": ["0"]})
    assert list(convergence_numbers(loaded, METRICS[0])["total_bytes"]) == sent[19::20]


def test_one_worker_sends_nothing_and_has_no_panel_for_it(tmp_path: Path) -> None:
    write_run(tmp_path, "micro", world_size=1)
    figure = draw_convergence(convergence_numbers(frames.load(tmp_path), METRICS[0]), METRICS[0], "one")
    assert [axes.get_xlabel() for axes in figure.axes] == ["step", "training time (s)"]


def test_a_perplexity_figure_has_the_same_bytes_each_time_and_names_its_columns(mixed: Path, tmp_path: Path) -> None:
    def written(place: Path) -> list[Path]:
        group = next(group for group in groups(frames.load(mixed)) if group.model == "lstm")
        numbers = convergence_numbers(group.frames, group.metric)
        return save(draw_convergence(numbers, group.metric, group.title), numbers, place / "convergence")

    first, second = written(tmp_path / "first"), written(tmp_path / "second")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    header = first[-1].read_text().splitlines()[0].split(",")
    assert header[-4:] == ["perplexity", "perplexity_half_range", "perplexity_min", "perplexity_max"]
    assert not {"accuracy", "hit_rate"} & set(header)


def test_tables_of_mixed_studies_name_each_ones_measure(mixed: Path) -> None:
    table = summary(mixed)
    text = tables.markdown(table)
    headings = {cell.strip() for line in text.splitlines() for cell in line.split("|")}
    assert {"accuracy %", "perplexity", "HR@10 %"} <= headings
    assert "nan" not in text
    assert "not finite" not in text
    rows = of_study(table[table["model"] == "neumf"])
    assert {"hit_rate", "ndcg"} <= set(rows)
    assert not {"accuracy", "perplexity_half_range"} & set(rows)
    assert draw_methods(rows, METRICS[2], "methods").axes[0].get_xlabel().startswith("hit rate at 10 (%)")


def test_a_run_that_is_not_finite_is_not_averaged_away(tmp_path: Path) -> None:
    for seed in (0, 1):
        path = write_run(tmp_path, "micro", seed, task="text") / "epochs.jsonl"
    _write_rows(path, [row | {"perplexity": None if row["epoch"] == 2 else 50.0} for row in _rows(path)])
    assert "not finite" in tables.markdown(summary(tmp_path))
    perplexity = metric_of(["perplexity"])
    numbers = convergence_numbers(frames.load(tmp_path), perplexity)
    assert list(numbers["perplexity"].isna()) == [False, False, True]


def test_a_study_that_is_nowhere_finite_is_drawn_all_the_same(tmp_path: Path) -> None:
    for sparsifier in ("dense", "micro"):
        path = write_run(tmp_path, sparsifier, task="text") / "epochs.jsonl"
        _write_rows(path, [row | {"perplexity": None, "test_loss": None} for row in _rows(path)])
    (group,) = groups(frames.load(tmp_path))
    numbers = convergence_numbers(group.frames, group.metric)
    assert group.metric.key == "perplexity"
    draw_convergence(numbers, group.metric, group.title).draw_without_rendering()
    draw_methods(summary(tmp_path), group.metric, group.title).draw_without_rendering()


def test_epochs_that_measured_nothing_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path, "micro") / "epochs.jsonl"
    _write_rows(path, [{"epoch": 2, "step": 60, "time_s": 1.0, "train_loss": 2.0}])
    with pytest.raises(UserError, match=r"epochs\.jsonl: none of accuracy, perplexity, .* was measured; remove"):
        frames.load(tmp_path)


@pytest.mark.parametrize(
    ("row", "key", "words", "cell"),
    [
        ({"test_loss": 0.2, "accuracy": 0.93}, "accuracy", "accuracy 0.93", "93.00"),
        ({"test_loss": 4.8, "perplexity": 123.4}, "perplexity", "perplexity 123.4", "123.4"),
        ({"ndcg": 0.4, "hit_rate": 0.61}, "hit_rate", "hit rate 0.61", "61.00"),
    ],
)
def test_a_measure_is_known_by_its_key(row: Row, key: str, words: str, cell: str) -> None:
    metric = metric_of(row)
    assert metric.key == key
    assert in_words(row) == words
    assert metric.format(row[key]) == cell


def test_long_runs_are_smoothed_and_thinned(tmp_path: Path) -> None:
    write_run(tmp_path, "micro", epochs=3, per_epoch=300)
    numbers = density_numbers(frames.steps(tmp_path))
    raw = [row["density"] for row in _rows(tmp_path / "micro-d0.01-s0" / "steps.jsonl")]
    assert list(numbers["step"]) == list(range(0, 900, 3))
    middle = numbers.set_index("step").loc[450, "density"]
    assert middle == pytest.approx(statistics.median(raw[446:455]))


def test_summary_agrees_with_the_records(study: Path) -> None:
    table = summary(study).set_index("sparsifier")
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
    assert all(label(name) in text for name in ("dense", "topk", *RULES))
    assert "…" not in text


def test_markdown_has_a_row_per_method(drawn: Path) -> None:
    text = (drawn / "summary.md").read_text()
    assert text.startswith("## ResNet-18 on CIFAR-10, 8 workers\n")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 5
    assert len({line.count("|") for line in lines}) == 1


def test_table_only_draws_nothing(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--runs", str(study), "--out", str(tmp_path), "--table"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == TABLES
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


@pytest.mark.parametrize("num_unfinished", [0, 1])
def test_nothing_finished_is_one_line_and_exit_code_2(
    num_unfinished: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(num_unfinished):
        (write_run(tmp_path, "topk", seed) / "DONE").unlink()
    assert figures.main(["--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "no finished run" in message
    assert "python -m experiments.train" in message
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_line(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert figures.main(["--runs", str(study), "--out", str(tmp_path / "file" / "out"), "--table"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_empty_record_is_named(tmp_path: Path) -> None:
    _write_rows(write_run(tmp_path, "topk") / "epochs.jsonl", [])
    with pytest.raises(UserError, match=r"epochs\.jsonl has no rows"):
        frames.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "kept", "said"),
    [
        ("steps.jsonl", 0.5, r"steps\.jsonl ends after \d+ bytes of \d+.*; run it again with resume=scratch$"),
        ("epochs.jsonl", 0.5, r"epochs\.jsonl ends after \d+ bytes of \d+.*; run it again"),
        ("DONE", 0.5, r"DONE is not whole; run it again"),
        ("DONE", 0.0, r"DONE is not whole; run it again"),
    ],
)
def test_a_torn_file_of_a_finished_run_is_told_by_its_name(tmp_path: Path, name: str, kept: float, said: str) -> None:
    path = write_run(tmp_path, "micro") / name
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(UserError, match=said):
        frames.load(tmp_path)


def test_runs_that_differ_in_more_than_the_seed_are_never_averaged(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            write_run(tmp_path, "topk", seed, lr=rate)
    table = summary(tmp_path)
    assert list(table["variant"]) == ["lr=0.1", "lr=0.2"]
    assert list(table["num_seeds"]) == [2, 2]


def test_a_run_that_adds_no_gradients_up_is_not_named_for_that(tmp_path: Path) -> None:
    for number in (1, 4):
        path = write_run(tmp_path, "topk", seed=number) / "config.yaml"
        path.write_text(f"{path.read_text()}accumulate: {number}\n")
        finished(RunFolder(path.parent))
    assert list(summary(tmp_path)["variant"]) == ["", "accumulate=4"]


def test_a_table_calls_each_run_by_its_parts_and_settings(tmp_path: Path) -> None:
    parts: dict[str, Row] = {
        "Top-k": {"name": "topk", "selector": {"name": "topk"}},
        "theirs": {"name": "topk", "selector": "theirs"},
        "theirs (share=0.5)": {"name": "topk", "selector": {"name": "theirs", "share": 0.5}},
        "MiCRO": {"name": "micro", "selector": {"name": "micro", "rule": "agreed"}},
        "MiCRO (slack=0.1)": {"name": "micro", "selector": {"name": "micro", "rule": "agreed", "slack": 0.1}},
        "MiCRO, two messages": {"name": "micro", "selector": {"name": "micro", "rule": "agreed", "slack": 0.2}},
        "MiCRO, codec half": {"name": "micro", "selector": {"name": "micro", "rule": "agreed"}, "codec": "half"},
    }
    for seed, own in enumerate(parts.values()):
        path = write_run(tmp_path, "topk", seed) / "config.yaml"
        usual = {"reducer": "sparse", "exchange": "union", "codec": "raw", "indices": "int32", "feedback": "residual"}
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"sparsifier": {**usual, **own}}))
        finished(RunFolder(path.parent))
    table = summary(tmp_path)
    assert {label(row["sparsifier"], row["variant"]) for _, row in table.iterrows()} == set(parts)
    assert list(table["num_seeds"]) == [1] * len(parts)


def test_milliseconds_of_long_steps_are_written_out() -> None:
    assert [three_digits(number) for number in (0.12345, 12.345, 999.4, 999.6, 2061.2)] == [
        *("0.123", "12.3", "999", "1000", "2061")
    ]


def test_a_dense_run_belongs_to_every_density_and_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for density in (0.1, 0.01):
        write_run(tmp_path, "dense", density=density)
        write_run(tmp_path, "topk", density=density)
    loaded = frames.load(tmp_path)
    assert [list(group.frames.runs["sparsifier"]) for group in groups(loaded)] == [["dense", "topk"]] * 2
    assert "same experiment and seed as dense-d0.01-s0: dense-d0.1-s0" in capsys.readouterr().out
    selected = frames.load(tmp_path, {"density": ["0.1"]}).runs
    assert sorted(zip(selected["sparsifier"], selected["density"], strict=True)) == [("dense", 1.0), ("topk", 0.1)]


def test_selection(study: Path) -> None:
    chosen = frames.load(study, parse_selection(["sparsifier=topk,micro", "model.name=ResNet18", "seed=1"])).runs
    assert sorted(chosen["run"]) == ["micro-d0.01-s1", "topk-d0.01-s1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["densty=0.1"], "no run has the key 'densty'; did you mean 'density'?"),
        (["seed=7"], "seed=7 fits no run; present: 0, 1"),
        (["seed="], "a selection is KEY=VALUE or KEY=VALUE,VALUE, got 'seed='"),
    ],
)
def test_a_wrong_selection_is_explained(
    words: list[str], message: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main(["--runs", str(study), *words]) == 2
    assert capsys.readouterr().err.strip() == f"error: {message}"


def test_thinning_keeps_the_same_steps_of_every_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        path = write_run(tmp_path, "micro", seed, per_epoch=300) / "steps.jsonl"
        rows = _rows(path)
        rows[seed + 1]["skipped"] = True
        _write_rows(path, rows)
    numbers = density_numbers(frames.steps(tmp_path))
    assert set(numbers.groupby("step").size()) == {2}


@pytest.mark.parametrize("every", [5, 6])  # 900 steps are thinned by 3: prime to a round's length, and a divisor
def test_curves_of_densities_and_rules_join_the_ends_of_rounds(tmp_path: Path, every: int) -> None:
    for method in ("micro", "micro_repaired"):
        path = write_run(tmp_path / "runs", method, per_epoch=300) / "steps.jsonl"
        within = dict.fromkeys(("density", "target_density", "density_error", "rule", "threshold"))
        _write_rows(path, [row | (within if row["step"] % every != every - 1 else {}) for row in _rows(path)])
    draw_all(frames.load(tmp_path / "runs"), tmp_path, ["density", "rules"])
    for name in ("density", "rules-micro"):
        numbers = pd.read_csv(tmp_path / f"{name}-resnet18-cifar10-n8-d0.01.csv")
        assert set(numbers["step"]) == set(range(every - 1, 900, every))
        assert numbers["density"].notna().all()


def test_times_of_local_steps_hold_their_share_of_the_exchange(tmp_path: Path) -> None:
    exchange_ms = TRAITS["micro"][2][2]
    for world_size, every in ((2, 1), (4, 7)):
        path = write_run(tmp_path, "micro", world_size=world_size).rename(tmp_path / f"n{world_size}") / "steps.jsonl"
        rows = _rows(path)
        for row in rows:
            row |= {"compute_s": 0.04, "select_s": 0.0, "rest_s": 0.0, "exchange_s": 0.0}
            if row["step"] % every == every - 1:
                row |= {"exchange_s": 1e-3 * exchange_ms, "round": row["step"] // every, "fragment": 0}
        _write_rows(path, rows)
    found = summary(tmp_path).set_index("world_size")["exchange_ms"]
    assert found.to_dict() == pytest.approx({2: exchange_ms, 4: exchange_ms / 7})
    numbers = throughput_numbers(frames.load(tmp_path)).set_index("world_size")
    assert numbers["efficiency"][4] == pytest.approx((40 + exchange_ms) / (40 + exchange_ms / 7))


def test_of_a_run_that_skipped_all_steps_a_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "runs", "micro") / "steps.jsonl"
    _write_rows(path, [row | {"skipped": True, "density": 0.0, "loss": None} for row in _rows(path)])
    assert figures.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line and "/" not in line]
    assert len(lines) == 1
    assert "micro-d0.01-s0" in lines[0]
    assert {path.name.split("-")[0] for path in tmp_path.glob("*.png")} == {"convergence"}


def test_an_output_without_the_sign_of_plus_or_minus_has_a_question_mark(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert figures.main(["--runs", str(study), "--out", str(tmp_path), "--table"]) == 0
    assert b"? half the range" in written.getvalue()


def test_skipped_steps_are_in_no_curve(tmp_path: Path) -> None:
    path = write_run(tmp_path, "micro") / "steps.jsonl"
    rows = _rows(path)
    rows[30] |= {"skipped": True, "density": 0.0, "loss": None}
    _write_rows(path, rows)
    numbers = density_numbers(frames.steps(tmp_path))
    assert 30 not in set(numbers["step"])
    assert summary(tmp_path)["measured_density"][0] == pytest.approx(
        statistics.mean(row["density"] for row in rows if not row["skipped"])
    )


def test_style_does_not_leak_into_the_callers_settings(tmp_path: Path) -> None:
    matplotlib.rcParams["font.size"] = 13
    try:
        with style():
            assert matplotlib.rcParams["font.size"] == 8
        assert matplotlib.rcParams["font.size"] == 13
    finally:
        matplotlib.rcParams["font.size"] = matplotlib.rcParamsDefault["font.size"]


def test_throughput_counts_samples_of_real_workers(tmp_path: Path) -> None:
    for world_size in (2, 4):
        write_run(tmp_path / str(world_size), "topk", world_size=world_size).rename(tmp_path / f"n{world_size}")
    numbers = throughput_numbers(frames.load(tmp_path)).set_index("world_size")
    step_s = sum(TRAITS["topk"][2]) / 1000
    assert numbers["samples_per_s"][4] == pytest.approx(4 * 32 / step_s, rel=0.2)
    assert numbers["efficiency"][2] == 1
    assert numbers["efficiency"][4] == pytest.approx(1, rel=0.05)
    written = draw_all(frames.load(tmp_path), tmp_path / "out", ["throughput"])
    assert [path.name for path in written] == [
        f"throughput-resnet18-cifar10.{end}" for end in ("pdf", "png", "csv", "runs.txt")
    ]


def test_nothing_to_draw_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", "topk")
    words = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--only"]
    assert figures.main([*words, "throughput"]) == 2
    assert "nothing to draw for throughput" in capsys.readouterr().err
    assert figures.main([*words, "residul"]) == 2
    assert "did you mean 'residual'" in capsys.readouterr().err


def test_of_many_methods_the_best_are_in_colour_and_all_are_drawn() -> None:
    ends = {("dense", ""): 0.1, ("micro", ""): 0.2, **{(f"m{place}", ""): 0.5 + place / 100 for place in range(10)}}
    rows = [
        {"run": f"{method[0]}-{epoch}", "sparsifier": method[0], "variant": method[1], "step": epoch, "accuracy": end}
        | {"time_s": 1.0, "total_bytes": 8.0, "num_seeds": 1, "accuracy_min": end, "accuracy_max": end}
        for method, end in ends.items()
        for epoch in (0, 1)
    ]
    numbers = pd.DataFrame(rows)
    coloured = leading(numbers, METRICS[0])
    best = {(f"m{place}", "") for place in range(4, 10)}
    assert set(coloured or ()) == {("dense", ""), ("micro", ""), *best}
    assert leading(numbers[~numbers["sparsifier"].isin(["m0", "m1", "m2", "m3"])], METRICS[0]) is None
    figure = draw_convergence(numbers, METRICS[0], "Many", coloured=coloured)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "4 others, in the table"
    assert len(legend.get_texts()) == 9
    grey = [line for line in figure.axes[0].get_lines() if line.get_color() == GREY_LINE["color"]]
    assert (len(grey), len(figure.axes[0].get_lines())) == (4, 12)


@pytest.fixture(scope="module")
def at_two_densities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six methods at two densities and dense, two seeds each; what is drawn of them is in the folder ``out``."""
    root = tmp_path_factory.mktemp("densities")
    for method, seed in itertools.product(("dense", "topk", "micro", "cltk", "threshold", "randomk"), (0, 1)):
        for density in (0.1,) if method == "dense" else (0.01, 0.1):
            write_run(root / "runs", method, seed, density=density)
    assert figures.main(["--runs", str(root / "runs"), "--out", str(root / "out")]) == 0
    return root


def test_accuracy_over_density_is_drawn_with_the_spread_over_seeds(at_two_densities: Path) -> None:
    numbers = pd.read_csv(at_two_densities / "out" / "densities-resnet18-cifar10-n8.csv", keep_default_na=False)
    assert (at_two_densities / "out" / "densities-resnet18-cifar10-n8.png").exists()
    rows = numbers[numbers["sparsifier"] == "micro"].set_index("density")
    for density in (0.01, 0.1):
        runs = [at_two_densities / "runs" / f"micro-d{density:g}-s{seed}" for seed in (0, 1)]
        ends = [_rows(run / "epochs.jsonl")[-1]["accuracy"] for run in runs]
        expected = [statistics.mean(ends), min(ends), max(ends)]
        assert list(rows.loc[density, ["accuracy", "accuracy_min", "accuracy_max"]]) == pytest.approx(expected)


def test_one_density_is_no_figure_of_accuracy_over_density(study: Path, tmp_path: Path) -> None:
    assert figures.main(["--runs", str(study), "--out", str(tmp_path), "--only", "densities"]) == 2


def test_no_two_methods_of_a_figure_have_one_colour(at_two_densities: Path) -> None:
    (group, _) = groups(frames.load(at_two_densities / "runs"))
    numbers = convergence_numbers(group.frames, group.metric)
    legend = draw_convergence(numbers, group.metric, group.title).legends[0]
    colours = {
        text.get_text().partition(" (")[0]: handle.get_color()  # type: ignore[attr-defined]
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }
    assert len(set(colours.values())) == len(colours) == 6
    assert (colours["Dense"], colours["MiCRO"]) == (BLACK, VERMILLION)


def test_two_densities_are_two_rows_and_two_lines(at_two_densities: Path, tmp_path: Path) -> None:
    axes = draw_methods(summary(at_two_densities / "runs"), METRICS[0], "methods").axes[0]
    named = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(named)) == len(named) == 11
    assert {"MiCRO, 0.01", "MiCRO, 0.1", "Dense"} <= set(named)
    for world_size, density in itertools.product((2, 4), (0.01, 0.1)):
        folder = write_run(tmp_path / f"{world_size}", "topk", density=density, world_size=world_size)
        folder.rename(tmp_path / f"n{world_size}-d{density}")
    legend = draw_throughput(throughput_numbers(frames.load(tmp_path)), "throughput").legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["Top-k, 0.01 (n=1)", "Top-k, 0.1 (n=1)", "linear"]


def test_a_large_figure_is_written_with_few_colours(tmp_path: Path) -> None:
    figure = new_figure(4, 3)
    figure.subplots().imshow(np.random.default_rng(0).random((300, 400, 3)), interpolation="nearest")
    figure.set_dpi(200)
    first, second = (save(figure, pd.DataFrame(), tmp_path / name)[1] for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    with Image.open(first) as image:
        assert image.mode == "P"
        assert len(image.getcolors() or ()) <= NUM_COLOURS
