"""What a method is said to send, against what its ranks really call."""

import statistics
from functools import cache

import pytest
import torch

import micro
from experiments.studies.gradient_sources import fitting_scale, layered
from experiments.studies.methods import build_methods, known_methods
from micro.exchanges.in_pieces import InPieces
from micro.flat import Layout
from micro.planning.volumes import Calls, calls_of
from micro.randomness import generator
from micro.selectors.per_tensor import PerTensor
from tests.products import grid

NUMEL, DENSITY, NUM_STEPS = 4608, 0.04, 11  # 8 matrices of 24 x 24
LAYOUT = layered(NUMEL)
METHODS = known_methods()
NEAR = 3  # of Ok-Topk's calls, where lists travel, the one whose size depends on how the sums lie
LOOSE = {
    "oktopk": 0.25,
    "oktopk_published": 0.25,
    "dsa": 0.1,
    "dsa_published": 0.1,
    "micro_slack": 0.2,
}  # what lies in a region, or a slice, varies
SELDOM_K = {"threshold", "redsync", "accordion", *(name for name in METHODS if name.endswith("_published"))}


@cache
def reducers() -> dict[str, micro.Reducer]:
    """Return the reducers of all methods, made together."""
    return build_methods(METHODS, DENSITY)


@cache
def step_of(method: str, world_size: int) -> list[micro.StepStats]:
    """Return what the ranks report of a step of a method."""
    return settled(reducers()[method], world_size)


def settled(reducer: micro.Reducer, world_size: int) -> list[micro.StepStats]:
    """Return what the ranks report of a late step: of the last few, one that calls least, for it looks for nothing."""
    simulation, drawn = micro.Simulation(reducer, LAYOUT, world_size), generator(7)
    scale = fitting_scale(DENSITY, NUMEL)
    try:
        steps = [simulation.step_(scale * torch.randn(world_size, NUMEL, generator=drawn)) for _ in range(NUM_STEPS)]
    finally:
        simulation.close()
    return min(reversed(steps[NUM_STEPS // 2 :]), key=lambda stats: stats[0].num_collectives)


def called(stats: list[micro.StepStats], *, busiest: bool) -> Calls:
    """Return the operations of a step with their sizes: the mean over ranks, or that of the rank that sends most."""
    over = max if busiest else statistics.fmean
    return tuple(
        (calls[0][0], over([size for _, size in calls])) for calls in zip(*(s.calls for s in stats), strict=True)
    )


@pytest.mark.slow
@grid(method=METHODS, world_size=[2, 8])
def test_calls_are_those_of_a_step(method: str, world_size: int) -> None:
    """The same collectives in the same order, with sizes within a few percent."""
    reducer = reducers()[method]
    stats = step_of(method, world_size)
    counts = {"local_count": statistics.fmean(stats[0].counts), "longest_count": max(stats[0].counts)}
    said = calls_of(reducer, NUMEL, world_size, build_up=stats[0].build_up, layout=LAYOUT, **counts)
    real = called(stats, busiest=method.startswith("gtopk"))
    assert [op for op, _ in said] == [op for op, _ in real]
    for place, ((_, expected), (_, size)) in enumerate(zip(said, real, strict=True)):
        if method != "oktopk" or place != NEAR:
            assert expected == pytest.approx(size, rel=LOOSE.get(method, 0.03), abs=8), f"call {place} of {real}"


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SELDOM_K])
def test_what_is_not_said_is_estimated(method: str) -> None:
    """Without counts and build-up bytes are near to those of independent gradients: choices meet by chance."""
    reducer = reducers()[method]
    real = sum(size for _, size in called(step_of(method, 3), busiest=method.startswith("gtopk")))
    assert sum(size for _, size in calls_of(reducer, NUMEL, 3, layout=LAYOUT)) == pytest.approx(real, rel=0.3)


def parts(selector: object, exchange: object, **settings: object) -> micro.SparseReducer:
    """Return a composition that no yaml has."""
    return micro.SparseReducer(selector, DENSITY, exchange, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reducer",
    [
        parts(micro.TopK(), InPieces(piece_mb=0.005)),
        parts(micro.TopK(), InPieces(each=micro.Gather(), ends=(1000, NUMEL))),
        parts(micro.Micro(), InPieces(each=micro.Union(), piece_mb=0.008)),
        parts(micro.RandomK(), InPieces(piece_mb=1.0), codec=micro.Half()),
        parts(micro.RandomK(), InPieces(piece_mb=0.005), codec=micro.Half()),
        parts(micro.Micro(), micro.Gather(), indices=micro.Packed()),
        parts(micro.Threshold(), micro.Gather()),
        parts(PerTensor(selector=micro.Threshold(value=1e-3)), micro.Union()),
    ],
    ids=lambda reducer: f"{reducer.selector.full_name}-{reducer.exchange.full_name}",
)
def test_other_compositions_are_known_too(reducer: micro.SparseReducer) -> None:
    """Piece by piece, parameter by parameter, and parts that seldom meet."""
    stats = settled(reducer, 3)
    chosen = statistics.fmean(stats[0].counts)
    said = calls_of(reducer, NUMEL, 3, build_up=stats[0].build_up, local_count=chosen, layout=LAYOUT)
    real = called(stats, busiest=False)
    assert [op for op, _ in said] == [op for op, _ in real]
    assert sum(size for _, size in said) == pytest.approx(sum(size for _, size in real), rel=0.1)


def test_powersgd_needs_shapes() -> None:
    """Matrices shrink, the rest travels whole, and with nothing to approximate there is one all-reduce."""
    layout = Layout(("matrix", "bias", "square"), ((40, 30), (30,), (20, 20)))
    left, right = 2 * 40 + 2 * 20 + 30 + 1, 2 * 30 + 2 * 20
    reducer = micro.PowerSGD(rank=2)
    assert calls_of(reducer, layout.numel, 4, layout=layout) == (("all_reduce", 4 * left), ("all_reduce", 4 * right))
    assert calls_of(reducer, 50, 4, layout=Layout.flat(50)) == (("all_reduce", 4 * 51),)
    with pytest.raises(ValueError, match="shapes: give a layout"):
        calls_of(reducer, 100, 4)


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_calls_nothing(method: str) -> None:
    """Whatever the method."""
    assert calls_of(reducers()[method], NUMEL, 1, layout=LAYOUT) == ()


def test_the_width_of_numbers_counts() -> None:
    """A dense mean travels as it is, what is accumulated in four bytes at least."""
    assert calls_of(micro.DenseReducer(), 100, 2, element_bytes=2) == (("all_reduce", 200),)
    for width, accumulated in ((2, 4), (4, 4), (8, 8)):
        _, (_, indices), (_, values) = calls_of(parts(micro.TopK(), micro.Gather()), 1000, 2, element_bytes=width)
        assert (indices, values) == (4 * 40, accumulated * 40)


def test_ranks_that_choose_by_themselves_meet_by_chance() -> None:
    """The estimated union is between one rank's choice and all of them, and never more than there is."""
    for density, n in ((0.01, 4), (0.3, 8), (1.0, 3)):
        *_, (_, size) = calls_of(micro.SparseReducer(micro.TopK(), density), 1000, n)
        count = size / 4 - 1
        assert count == round(1000 * (1 - (1 - density) ** n))
        assert density * 1000 <= count <= min(n * density, 1) * 1000


def test_mistakes_are_told() -> None:
    """In one line with what was given."""
    reducer = parts(micro.TopK(), micro.Union())
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 2"):
        calls_of(reducer, 0, 2)
    with pytest.raises(ValueError, match="layout has 5 elements, the bucket 6"):
        calls_of(reducer, 6, 2, layout=Layout.flat(5))
    with pytest.raises(ValueError, match="element_bytes must be one of 2, 4, 8, got 3"):
        calls_of(reducer, 6, 2, element_bytes=3)


class Silent(micro.TopK):
    """A selector with requests of its own that does not say what it sends."""

    volume = micro.Selector.volume


def test_a_part_that_does_not_say_what_it_sends_is_an_error() -> None:
    """It is no method that sends nothing."""
    with pytest.raises(ValueError, match="what selector topk sends is not known: give it a method volume"):
        calls_of(micro.SparseReducer(Silent(), DENSITY), 1000, 2)
