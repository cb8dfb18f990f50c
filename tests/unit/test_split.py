"""Split: which parameters are dense, what becomes of their states, and what a dense start does."""

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.checkpoints.resizing import average
from micro.comm import Comm
from micro.planning.volumes import calls_of

LAYOUT = micro.Layout(
    ("body.weight", "body.bias", "norm.weight", "head.weight", "head.bias"), ((6, 8), (6,), (6,), (4, 6), (4,))
)
SHAPES = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))
VECTORS, MATRICES = ("body.bias", "norm.weight", "head.bias"), ("body.weight", "head.weight")
NUM_VECTORS, CPU = 16, torch.device("cpu")
TOPK = micro.SparseReducer(micro.TopK(), density=0.1)


def gradients(step: int, world_size: int = 2, layout: micro.Layout = LAYOUT) -> Tensor:
    randomness = torch.Generator().manual_seed(step)
    return torch.randn(world_size, layout.numel, generator=randomness, dtype=torch.float64)


def simulation(reducer: micro.Reducer, layout: micro.Layout = LAYOUT) -> micro.Simulation:
    return micro.Simulation(reducer, layout, 2, dtype=torch.float64)


def part(vector: Tensor, names: tuple[str, ...]) -> Tensor:
    pieces = LAYOUT.split(vector)
    return torch.cat([pieces[name] for name in LAYOUT.names if name in names])


@pytest.mark.parametrize(
    "which", [{"min_dims": 2}, {"dense": ("*.bias", "norm*")}, {"only": ("body.w*", "head.weight")}]
)
def test_dense_parameters_get_the_mean_and_the_others_what_the_reducer_alone_gives_them(which: Any) -> None:
    alone = micro.Layout(MATRICES, tuple(SHAPES[name] for name in MATRICES))
    with closing(simulation(micro.Split(reducer=TOPK, **which))) as split, closing(simulation(TOPK, alone)) as other:
        for step in range(4):
            grads = gradients(step)
            ours = split.step(grads)
            theirs = other.step(torch.stack([part(row, MATRICES) for row in grads]))
            assert torch.equal(part(ours.update, VECTORS), part(grads.mean(0), VECTORS))
            assert torch.equal(part(ours.update, MATRICES), theirs.update)
            stats, inner = ours.stats[0], theirs.stats[0]
            assert stats.dense_numel == NUM_VECTORS
            assert stats.global_count == inner.global_count + NUM_VECTORS
            assert stats.target_density == pytest.approx((inner.target_count + NUM_VECTORS) / LAYOUT.numel)
            assert stats.bytes_sent == inner.bytes_sent + 8 * NUM_VECTORS
            assert stats.calls == (("all_reduce", 8 * NUM_VECTORS), *inner.calls)
        assert not part(split.residuals()[0], VECTORS).any()


def test_a_bucket_of_one_kind_is_reduced_in_place() -> None:
    reducer = micro.Split(reducer=TOPK, min_dims=2)
    for layout, num_dense in ((micro.Layout(("a",), ((4, 4),)), 0), (micro.Layout(("b",), ((16,),)), 16)):
        state, grad = reducer.start(layout, torch.float64, CPU), gradients(0, 1, layout)[0]
        place = grad.data_ptr()
        assert reducer.reduce_(state, grad, Comm()).dense_numel == num_dense
        assert grad.data_ptr() == place


def test_buckets_can_be_cut_and_joined_without_losing_a_residual() -> None:
    reducer = micro.Split(reducer=TOPK, dense=("*.bias",))
    whole = reducer.start(LAYOUT, torch.float64, CPU)
    reducer.reduce_(whole, gradients(0, 1)[0], Comm())
    before = {name: piece.clone() for name, piece in LAYOUT.split(whole.residual).items()}
    cut = [micro.Layout(LAYOUT.names[places], LAYOUT.shapes[places]) for places in (slice(0, 3), slice(3, None))]
    parts = [reducer.rebuild(layout, [whole], torch.float64, CPU) for layout in cut]
    again = reducer.rebuild(LAYOUT, parts, torch.float64, CPU)
    assert again.step == 1
    for name, piece in LAYOUT.split(again.residual).items():
        assert torch.equal(piece, before[name])
        assert piece.any() != name.endswith(".bias")


def test_a_dense_start_is_the_mean_and_sends_no_indices() -> None:
    with closing(simulation(micro.Split(reducer=TOPK, start_step=2))) as split:
        for step in range(4):
            grads = gradients(step)
            out = split.step(grads)
            assert torch.equal(out.update, grads.mean(0)) == (step < 2)
            assert (out.stats[0].indices_bytes == 0) == (step < 2)
            assert (out.stats[0].step, out.stats[0].dense_numel) == (step, LAYOUT.numel if step < 2 else 0)


def test_the_mean_of_residuals_serves_another_number_of_workers() -> None:
    reducer = micro.Split(reducer=TOPK, min_dims=2)
    with closing(simulation(reducer)) as split:
        split.step(gradients(0))
        expected = torch.stack(split.residuals()).mean(0)
        (saved,) = average([{"buckets": [rank]} for rank in split.state_dict()["ranks"]], 1)
    state = reducer.load(saved["buckets"][0], torch.float64, CPU)
    assert torch.equal(state.residual, expected)
    assert state.step == 1


def test_a_state_with_other_dense_parameters_is_refused() -> None:
    reducer = micro.Split(reducer=TOPK, min_dims=2)
    saved = reducer.save(reducer.start(LAYOUT, torch.float32, CPU))
    with pytest.raises(ValueError, match=r"reduced 'body\.bias' densely, this one does not: use the same dense"):
        micro.Split(reducer=TOPK, dense=("norm*",)).load(saved, torch.float32, CPU)
    with pytest.raises(ValueError, match="state is of split topk, the reducer is topk"):
        TOPK.load(saved, torch.float32, CPU)


MOMENTUM = micro.SparseReducer(micro.TopK(), 0.1, feedback=micro.MomentumCorrection())
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "start_step"),
    ({"dense": 3}, "dense .* got 3"),
    ({"only": ("",)}, "only .* got ''"),
    ({"start_step": -1}, "start_step .* got -1"),
    ({"reducer": micro.DenseReducer(), "min_dims": 2}, "got dense"),
    ({"reducer": "micro", "min_dims": 2}, "reducer .* got 'micro'"),
    ({"reducer": MOMENTUM, "start_step": 2}, "momentum"),
    ({"dense": ("*.bais",)}, r"dense: .* '\*.bais'"),
    ({"only": ("*.weight", "x")}, "only: .* 'x'"),
    ({"dense": ("head*",), "only": ("*.weight",)}, "'head.weight' .* dense and only"),
    ({"dense": ("*",)}, "no parameter to sparsify"),
    ({"only": ("*.bias",), "min_dims": 2}, "no parameter to sparsify"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG, ids=str)
def test_settings_that_do_not_fit_a_model_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        micro.Split(**{"reducer": TOPK, **settings}).check_parameters(SHAPES)


def test_what_it_sends_depends_on_the_parameters() -> None:
    with pytest.raises(ValueError, match="depends on the parameters' names and shapes: give a layout"):
        calls_of(micro.Split(reducer=TOPK, min_dims=2), LAYOUT.numel, 2)
