"""The comparison measures what it says: against closed forms on tiny gradients, and for every yaml there is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import micro
from experiments import compare
from experiments.config.errors import UserError
from experiments.tools.compare import measure
from experiments.tools.compare.numbers import front
from experiments.tools.compare.trial import trial
from experiments.tools.shared.gradient_sources import SHAPES, Gradients, synthetic
from experiments.tools.shared.methods import build_methods
from experiments.tools.shared.recorded_gradients import Training, record, training_config
from experiments.tools.theory.measure import accumulators
from tests.legible import every_figure_is_legible
from tests.refusals import refused
from tests.tools.simulated_runs import IMAGES, Run, configured

N, NUMEL, STEPS, DENSITY = 4, 500, 5, 0.1
TWO = ["--methods", "topk,cltk", "--streams", "normal", "--world-sizes", "2", "--numel", "200", "--steps", "3"]
TWO += ["--select-numel", "none"]


def small(stream: str = "normal", **changes: float) -> Gradients:
    sizes = {"numel": NUMEL, "num_steps": STEPS, "world_size": N, "density": DENSITY} | changes
    return synthetic(stream, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", list(SHAPES))
def test_a_stream_is_the_same_in_any_world_that_holds_the_rank(stream: str) -> None:
    large, little = small(stream), small(stream, world_size=2)
    assert large.rows.shape == (STEPS, N, NUMEL)
    assert torch.equal(large.of(3, 2), little.of(3, 2))
    assert len({float(row.sum()) for row in large.rows.flatten(0, 1)}) == STEPS * N
    assert torch.allclose(large.totals(2)[3], large.rows[3, :2].double().sum(0))


def test_dense_is_exact_and_sends_what_dense_sends() -> None:
    row, steps = trial("dense", micro.DenseReducer(), small(), N)
    found = [row[key] for key in ("bytes_share", "mass_kept", "step_error", "cumulative_error")]
    assert found == pytest.approx([1, 1, 0, 0], abs=1e-6)
    assert len(steps) == STEPS


def test_errors_of_topk_equal_a_loop_by_hand() -> None:
    gradients, k = small(), round(DENSITY * NUMEL)
    row, _ = trial("topk", micro.SparseReducer(micro.TopK(), DENSITY, micro.Gather()), gradients, N)
    residual = torch.zeros(N, NUMEL, dtype=torch.float64)
    asked, given, errors, densities = torch.zeros(NUMEL), torch.zeros(NUMEL), [], []
    for step in range(STEPS):
        acc = residual + gradients.of(step, N).double()
        chosen = acc.abs().topk(k).indices
        sent = torch.zeros_like(acc).scatter(1, chosen, acc.gather(1, chosen))
        residual, update, mean = acc - sent, sent.mean(0), gradients.of(step, N).double().mean(0)
        asked, given = asked + mean, given + update
        errors.append(float((update - mean).norm() / mean.norm()))
        densities.append(int((sent != 0).any(0).sum()) / k)
    assert row["step_error"] == pytest.approx(sum(errors) / STEPS, rel=1e-5)
    assert row["cumulative_error"] == pytest.approx(float((given - asked).norm() / asked.norm()), rel=1e-5)
    assert row["build_up"] == pytest.approx(sum(densities) / STEPS)
    assert row["mass_kept"] == pytest.approx(1, abs=1e-6)
    assert row["indices_share"] + row["values_share"] == pytest.approx(8 * k * (N - 1) / (8 * NUMEL * (N - 1) / N))


def test_what_is_dropped_counts_as_lost_mass_and_momentum_as_kept() -> None:
    reducer = micro.SparseReducer(micro.TopK(), DENSITY, micro.Gather(), feedback=micro.NoFeedback())
    gradients = small(num_steps=1)
    magnitudes = gradients.rows[0, 0].abs().sort(descending=True).values
    kept = trial("topk", reducer, gradients, 1)[0]["mass_kept"]
    assert kept == pytest.approx(float(magnitudes[:50].sum() / magnitudes.sum()), rel=1e-5)
    assert trial("dgc", build_methods(["dgc"], 1.0)["dgc"], small(), N)[0]["mass_kept"] == pytest.approx(1, abs=1e-5)


def test_everything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    words = "--methods dense,topk,micro,randomk_unbiased --streams normal,correlated --world-sizes 2,4 --numel 500"
    more = "--steps 5 --select-numel 600,900 --densities 0.05"
    with every_figure_is_legible():
        assert compare.main([*words.split(), *more.split(), "--out", str(out)]) == 0
    stems = ("compare", "density", "build-up", "volume", "front-normal", "front-correlated", "selection", "tradeoff")
    expected = {f"{stem}.{suffix}" for stem in stems for suffix in ("pdf", "png", "csv")}
    assert {path.name for path in out.iterdir()} == expected - {"compare.pdf", "compare.png"} | {"compare.md"}
    numbers = pd.read_csv(out / "compare.csv")
    assert len(numbers) == 4 * 2 * 2
    shares = numbers[["counts_share", "indices_share", "values_share"]].sum(axis=1)
    assert list(shares) == pytest.approx(list(numbers["bytes_share"]))
    report = (out / "compare.md").read_text()
    last = numbers[(numbers["stream"] == "correlated") & (numbers["method"] == "topk")].set_index("world_size")
    row = next(line for line in report.split("by the number of workers: sent")[1].splitlines() if "Top-k" in line)
    sent = [f"{last.loc[n, 'bytes_share']:.3g}" for n in sorted(last.index)]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == sent


def test_one_worker_has_no_bytes_to_compare(tmp_path: Path) -> None:
    one = [*TWO, "--world-sizes", "1", "--out", str(tmp_path)]
    assert compare.main([*one, "--densities", "0.5"]) == 0
    assert (tmp_path / "compare.csv").exists()


def test_a_method_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "trial", failing(RuntimeError("broken"), at=1))
    assert compare.main([*TWO, "--out", str(tmp_path)]) == 1
    assert "failed: topk on normal gradients, 2 workers: RuntimeError: broken" in capsys.readouterr().out
    assert methods_in(tmp_path) == {"cltk"}
    assert "failed: topk" in (tmp_path / "compare.md").read_text()


def failing(error: BaseException, *, at: int, begun: list[str] | None = None) -> Callable[..., object]:
    """Return a trial whose call of this number, from 1, raises an error."""
    begun = [] if begun is None else begun

    def call(name: str, *others: Any, world_size: int) -> object:
        begun.append(name)
        if len(begun) == at:
            raise error
        return trial(name, *others, world_size)

    return call


def methods_in(out: Path) -> set[str]:
    return set(pd.read_csv(out / "compare.csv")["method"])


def test_an_interrupt_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(measure, "trial", failing(KeyboardInterrupt(), at=2, begun=begun))
    assert compare.main([*TWO, "--out", str(tmp_path)]) == 130
    assert methods_in(tmp_path) == {"topk"}
    assert "Stopped by the user" in (tmp_path / "compare.md").read_text()
    assert begun == ["topk", "cltk"]


RECORDINGS = {
    "several batches, clipped": ("accumulate=2", "optimizer.clip=0.05"),
    "clipped alike": ("optimizer.clip=0.05", "optimizer.clip_norm=global"),
    "a clipped update": ("optimizer.clip=0.05", "optimizer.clip_at=update"),
}


@pytest.mark.parametrize("case", RECORDINGS)
def test_recorded_gradients_equal_those_of_the_training(case: str, tmp_path: Path) -> None:
    words = [*IMAGES, "model=mlp", "dataset.settings.num_samples=64", "batch_size=4", *RECORDINGS[case]]
    config = configured(tmp_path, *words, "sparsifier=dense", world_size=2)
    seen: list[torch.Tensor] = []
    trained = Run(config, watch=lambda rank, gradient: seen.append(gradient.clone()) if rank == 1 else None)
    kept = record(words, num_steps=trained.trainer.position.step, world_size=2)
    assert kept.layout == trained.layout
    assert len(seen) == len(kept.rows) > 5
    assert all(torch.equal(row[1], gradient) for row, gradient in zip(kept.rows, seen, strict=True))


def test_accumulators_hold_what_top_k_did_not_send() -> None:
    words, topk = ["batch_size=4", "model=mlp"], micro.SparseReducer(micro.TopK(), 0.1)
    first, second = accumulators(words, 1, topk, [0, 1]).values()
    training = Training(training_config(words, 1), reducer=topk)
    gradients = [rows[0].clone() for rows in training.steps(2)]
    sent = first.abs().topk(round(0.1 * first.numel())).indices
    assert torch.equal(first, gradients[0])
    assert torch.equal(second, gradients[1] + first.index_fill(0, sent, 0.0))


def test_steps_after_the_end_of_a_schedule_are_refused() -> None:
    words = [*IMAGES, "lr_shape=cosine", "batch_size=32"]
    refused(lambda: record(words, num_steps=5, world_size=2), "2 epochs have 4", error=UserError)


def test_front_holds_what_nothing_beats() -> None:
    assert front([(3, 1), (1, 3), (2, 2), (2, 5), (4, 1), (1, 3)]) == [(1, 3), (2, 2), (3, 1)]
