"""The comparison measures what it says: against closed forms on tiny gradients, and for every yaml there is."""

import math
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

import micro
from experiments import compare
from experiments.config.errors import UserError
from experiments.reports.names import in_legend
from experiments.studies.gradient_sources import SHAPES, Gradients, synthetic, wide_sum
from experiments.studies.method_comparison import measure
from experiments.studies.method_comparison.equal_bytes import match_bytes
from experiments.studies.method_comparison.figures import draw_front
from experiments.studies.method_comparison.numbers import front
from experiments.studies.method_comparison.settings import ComparisonSettings
from experiments.studies.method_comparison.tasks import Results, Task, carry_out, processes
from experiments.studies.method_comparison.trial import trial
from experiments.studies.methods import build_methods, known_methods
from experiments.studies.recorded_gradients import Training, record, training_config
from experiments.studies.topk_theory.accumulators import accumulators
from tests.legible import every_figure_is_legible
from tests.refusals import refused
from tests.tools.simulated_runs import IMAGES, Run, configured

N, NUMEL, STEPS, DENSITY = 4, 500, 5, 0.1


def small(stream: str = "normal", **changes: float) -> Gradients:
    sizes = {"numel": NUMEL, "num_steps": STEPS, "world_size": N, "density": DENSITY} | changes
    return synthetic(stream, **sizes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "new" / "out"
    words = "--methods dense,topk,micro,randomk_unbiased --streams normal,correlated --world-sizes 2,4 --numel 500"
    with every_figure_is_legible():
        assert compare.main([*words.split(), "--steps", "5", "--select-numel", "600,900", "--out", str(out)]) == 0
    return out


def test_every_yaml_is_built() -> None:
    methods = known_methods()
    assert list(build_methods(methods, 0.01)) == methods


@pytest.mark.parametrize("stream", list(SHAPES))
def test_a_stream_is_the_same_in_any_world_that_holds_the_rank(stream: str) -> None:
    large, little = small(stream), small(stream, world_size=2)
    assert large.rows.shape == (STEPS, N, NUMEL)
    assert torch.equal(large.of(3, 2), little.of(3, 2))
    assert not torch.equal(large.rows[0, 0], large.rows[0, 1])
    assert not torch.equal(large.rows[0, 0], large.rows[1, 0])


def test_densities_of_equal_bytes_send_equal_bytes() -> None:
    gradients, wanted = small(numel=30_000), 0.02
    found = {name: match_bytes(name, wanted, 0.1, gradients, N) for name in ("topk_gather", "cltk", "dense", "int8")}
    assert found["dense"] == found["int8"] == [], "they send everything, whatever is asked"
    for name in ("topk_gather", "cltk"):
        (match,) = found[name]
        (reducer,) = build_methods([name], match["density"]).values()
        assert trial(name, reducer, gradients, N)[0]["bytes_share"] == match["bytes_share"]
        assert match["bytes_share"] == pytest.approx(wanted, rel=0.02)
    # 8 (n-1) p d bytes of pairs against 12 p d (n-1) / n: n / 1.5 times as many at the same density
    assert found["cltk"][0]["density"] / found["topk_gather"][0]["density"] == pytest.approx(N / 1.5, rel=0.05)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 8])
def test_a_wide_sum_adds_vectors_in_their_order(count: int) -> None:
    vectors = torch.randn(count, 300, generator=torch.Generator().manual_seed(3))
    one_by_one = torch.zeros(300, dtype=torch.float64)
    for vector in vectors:
        one_by_one += vector
    assert torch.equal(wide_sum(vectors), one_by_one)
    assert torch.equal(wide_sum(vectors[:, ::2]), one_by_one[::2])  # by torch


def test_gradients_beyond_the_memory_allowed_are_refused() -> None:
    with pytest.raises(UserError, match="need 4 GB, allowed are 1: lower --steps"):
        small(numel=1_000_000, num_steps=250)


def test_dense_is_exact_and_sends_what_dense_sends() -> None:
    row, steps = trial("dense", micro.DenseReducer(), small(), N)
    assert row["bytes_share"] == pytest.approx(1)
    assert row["step_error"] < 1e-6
    assert row["cumulative_error"] < 1e-6
    assert row["mass_kept"] == pytest.approx(1, abs=1e-6)
    assert len(steps) == STEPS


def test_errors_of_topk_are_those_of_a_loop_by_hand() -> None:
    gradients, k = small(), round(DENSITY * NUMEL)
    row, _ = trial("topk", micro.SparseReducer(micro.TopK(), DENSITY, micro.Gather()), gradients, N)
    residual = torch.zeros(N, NUMEL, dtype=torch.float64)
    asked, given, errors, densities = torch.zeros(NUMEL), torch.zeros(NUMEL), [], []
    for step in range(STEPS):
        acc = residual + gradients.of(step, N).double()
        sent = torch.zeros_like(acc)
        for rank in range(N):
            chosen = acc[rank].abs().argsort(descending=True)[:k]
            sent[rank, chosen] = acc[rank, chosen]
        residual, update, mean = acc - sent, sent.mean(0), gradients.of(step, N).double().mean(0)
        asked, given = asked + mean, given + update
        errors.append(float((update - mean).norm() / mean.norm()))
        densities.append(int((sent != 0).any(0).sum()) / k)
    assert row["step_error"] == pytest.approx(sum(errors) / STEPS, rel=1e-5)
    assert row["cumulative_error"] == pytest.approx(float((given - asked).norm() / asked.norm()), rel=1e-5)
    assert row["build_up"] == pytest.approx(sum(densities) / STEPS)
    assert row["mass_kept"] == pytest.approx(1, abs=1e-6)
    assert row["indices_share"] + row["values_share"] == pytest.approx(8 * k * (N - 1) / (8 * NUMEL * (N - 1) / N))


def test_what_is_dropped_counts_as_lost_mass() -> None:
    reducer = micro.SparseReducer(micro.TopK(), DENSITY, micro.Gather(), feedback=micro.NoFeedback())
    gradients = small(num_steps=1)
    row, _ = trial("topk", reducer, gradients, 1)
    magnitudes = gradients.rows[0, 0].abs().sort(descending=True).values
    assert row["mass_kept"] == pytest.approx(float(magnitudes[:50].sum() / magnitudes.sum()), rel=1e-5)


@pytest.mark.skipif("dgc" not in known_methods(), reason="needs a method that corrects momentum")
def test_momentum_is_counted_where_the_feedback_holds_it() -> None:
    row, _ = trial("dgc", build_methods(["dgc"], 1.0)["dgc"], small(), N)
    assert row["mass_kept"] == pytest.approx(1, abs=1e-5)


def test_everything_is_written(written: Path) -> None:
    stems = ("compare", "density", "build-up", "volume", "front-normal", "front-correlated", "selection")
    expected = {f"{stem}.{suffix}" for stem in stems for suffix in ("pdf", "png", "csv")}
    assert {path.name for path in written.iterdir()} == expected - {"compare.pdf", "compare.png"} | {"compare.md"}
    numbers = pd.read_csv(written / "compare.csv")
    assert len(numbers) == 4 * 2 * 2
    shares = numbers[["counts_share", "indices_share", "values_share"]].sum(axis=1)
    assert list(shares) == pytest.approx(list(numbers["bytes_share"]))
    report = (written / "compare.md").read_text()
    assert "`python -m experiments.compare --methods dense,topk,micro" in report
    assert "left out of the figures of density: Dense." in report
    assert report.count("## ") == 4
    last = numbers[(numbers["stream"] == "correlated") & (numbers["method"] == "topk")].set_index("world_size")
    row = next(line for line in report.split("by the number of workers: sent")[1].splitlines() if "Top-k" in line)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        f"{last.loc[n, 'bytes_share']:.3g}" for n in sorted(last.index)
    ]


def test_a_method_that_fails_is_told_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_for_topk(name: str, *others: object, world_size: int) -> object:
        if name == "topk":
            raise RuntimeError("broken")
        return trial(name, *others, world_size)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "trial", fail_for_topk)
    words = ["--methods", "topk,cltk", "--streams", "normal", "--world-sizes", "2", "--numel", "200", "--steps", "3"]
    assert compare.main([*words, "--select-numel", "none", "--out", str(tmp_path)]) == 1
    assert "failed: topk on normal gradients, 2 workers: RuntimeError: broken" in capsys.readouterr().out
    assert set(pd.read_csv(tmp_path / "compare.csv")["method"]) == {"cltk"}
    assert "failed: topk" in (tmp_path / "compare.md").read_text()


def test_an_interrupt_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def interrupted_at_cltk(name: str, *others: object, world_size: int) -> object:
        begun.append(name)
        if begun == ["topk", "cltk"]:
            raise KeyboardInterrupt
        return trial(name, *others, world_size)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "trial", interrupted_at_cltk)
    words = ["--methods", "topk,cltk", "--streams", "normal", "--world-sizes", "2", "--numel", "200", "--steps", "3"]
    words += ["--select-numel", "none"]
    assert compare.main([*words, "--out", str(tmp_path)]) == 130
    assert set(pd.read_csv(tmp_path / "compare.csv")["method"]) == {"topk"}
    assert "Stopped by the user" in (tmp_path / "compare.md").read_text()
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('["cltk on')  # as an interrupt may leave it
    assert compare.main([*words, "--out", str(tmp_path)]) == 0
    assert begun == ["topk", "cltk", "cltk"]
    assert set(pd.read_csv(tmp_path / "compare.csv")["method"]) == {"topk", "cltk"}
    assert not (tmp_path / "trials.jsonl").exists()


def test_results_of_other_settings_or_code_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    Results(path, {"revision": "a"}).add("one", [1.0, math.nan])
    assert repr(Results(path, {"revision": "a"}).done) == "{'one': [1.0, nan]}"
    other = Results(path, {"revision": "b"})
    assert other.done == {}
    other.add("two", 2)
    assert Results(path, {"revision": "a"}).done == {}
    assert Results(path, {"revision": "b"}).done == {"two": 2}


def test_several_processes_measure_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ComparisonSettings(
        methods=["topk"],
        streams=["normal", "laplace", "recorded"],
        world_sizes=[2],
        density=DENSITY,
        numel=NUMEL,
        num_steps=3,
        recorded_training=["model=mlp", "dataset=digits", "batch_size=8"],
        repeats=1,
        max_gb=1.0,
    )
    rows = []
    for number in (1, 2):
        monkeypatch.setattr(measure, "num_processes", lambda _, number=number: number)
        done = measure.measure(settings, lambda *_: None, Results(tmp_path / str(number), {}))
        assert not done.failures
        rows.append([row | {"select_topks": 0} for row in done.rows])
    assert [row["stream"] for row in rows[0]] == list(settings.streams)
    assert rows[0] == rows[1]
    assert not multiprocessing.active_children()


def test_a_process_that_dies_ends_the_comparison_with_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_and_no_more(tasks: list[Task], results: Results, pool: object) -> Iterator[str]:
        yield from carry_out(tasks[:1], results, None)
        with processes(2) as real:
            yield from carry_out([Task("dies", "rows", partial(os._exit, 3))], results, real)

    monkeypatch.setattr(measure, "carry_out", one_and_no_more)
    words = ["--methods", "topk,cltk", "--streams", "normal", "--world-sizes", "2", "--numel", "200", "--steps", "3"]
    assert compare.main([*words, "--select-numel", "none", "--out", str(tmp_path)]) == 1
    assert "failed: a process was killed" in capsys.readouterr().out
    assert set(pd.read_csv(tmp_path / "compare.csv")["method"]) == {"topk"}
    assert (tmp_path / "trials.jsonl").exists()


MISTAKES = {
    "--methods topk,mikro": ("methods", "mikro"),
    "--streams gaussian": ("streams", "gaussian"),
    "--world-sizes 2 4": ("KEY=VALUE", "4"),
    "seed=1 --steps 2 batch_size=4": ("batch_size=4", "unrecognized"),
    "--streams recorded --methods topk model=resnet9": ("model", "resnet9"),
    "--streams recorded --methods topk density=0.1": ("density=0.1", "recording"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, tmp_path: Path) -> None:
    refused(f"compare {words} --out {tmp_path}", *MISTAKES[words])


RECORDINGS = {
    "a whole batch": (),
    "several batches": ("accumulate=2",),
    "clipped gradients": ("optimizer.clip=0.05",),
    "clipped alike": ("optimizer.clip=0.05", "optimizer.clip_norm=global"),
    "a clipped update": ("optimizer.clip=0.05", "optimizer.clip_at=update"),
    "gradients times the rate": ("optimizer.lr_at=gradient", "optimizer.clip=0.05"),
}


@pytest.mark.parametrize("case", RECORDINGS)
def test_recorded_gradients_are_those_of_the_training(case: str, tmp_path: Path) -> None:
    words = [*IMAGES, "model=mlp", "dataset.settings.num_samples=64", "batch_size=4", *RECORDINGS[case]]
    config = configured(tmp_path, *words, "sparsifier=dense", world_size=2)
    seen: list[torch.Tensor] = []
    trained = Run(config, watch=lambda rank, gradient: seen.append(gradient.clone()) if rank == 1 else None)
    kept = record(words, num_steps=trained.trainer.position.step, world_size=2)
    assert kept.layout == trained.layout
    assert len(seen) == len(kept.rows) > 5
    for step, gradient in enumerate(seen):
        assert torch.equal(kept.rows[step, 1], gradient)


def test_accumulators_hold_what_top_k_did_not_send() -> None:
    words = ["batch_size=4", "model=mlp"]
    first, second = (vector.values for vector in accumulators(words, 1, 0.1, [0, 1]))
    with closing(Training(training_config(words, 1), reducer=micro.SparseReducer(micro.TopK(), 0.1))) as training:
        gradients = [rows[0].clone() for rows in training.steps(2)]
    sent = first.abs().topk(round(0.1 * first.numel())).indices
    assert torch.equal(first, gradients[0])
    assert torch.equal(second, gradients[1] + first.index_fill(0, sent, 0.0))


def test_steps_after_the_end_of_a_schedule_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 epochs have 4, after which the learning rate .* is 0"):
        record([*IMAGES, "lr_shape=cosine", "batch_size=32"], num_steps=5, world_size=2)


def test_front_holds_what_nothing_beats() -> None:
    assert front([(3, 1), (1, 3), (2, 2), (2, 5), (4, 1), (1, 3)]) == [(1, 3), (2, 2), (3, 1)]


def test_of_many_methods_the_front_and_what_all_know_have_a_mark() -> None:
    methods = ["randomk", "cltk", "topk", "micro", "dense", *[f"other{place}" for place in range(20)]]
    worst = [1.0] * 20
    rows = pd.DataFrame({"method": methods}).assign(
        bytes_share=[0.01, 0.02, 0.2, 0.03, 1.0, *[0.5] * 20],
        step_error=[0.9, 0.8, 0.9, 0.95, 0.0, *worst],
        cumulative_error=[0.9, 0.95, 0.9, 0.95, 0.0, *worst],
    )
    names = {text.get_text() for text in draw_front(rows, "Many").legends[0].get_texts()}
    assert {in_legend(name) for name in methods[:5]} | {"20 others, in the table"} < names
    assert len(names) == 7
