"""What a method is said to send: estimates, widths, and what is refused. That it is what ranks send is a law."""

import statistics
from contextlib import closing

import pytest
import torch

import micro
from experiments.studies.gradient_sources import fitting_scale, layered
from experiments.studies.methods import build_methods
from micro.flat import Layout
from micro.operations import bytes_sent
from micro.planning.volumes import calls_of, volume_of
from micro.randomness import generator

NUMEL, DENSITY = 4608, 0.04  # 8 matrices of 24 x 24
LAYOUT = layered(NUMEL)
TOPK = micro.SparseReducer(micro.TopK(), DENSITY)


@pytest.mark.parametrize(
    "method", ["topk", "topk_gather", "micro", "cltk", "oktopk", "dsa", "gaussiank", "int8", "fft"]
)
def test_what_is_not_said_is_estimated(method: str) -> None:
    """Without counts and build-up bytes are near to those of independent gradients: choices meet by chance."""
    reducer, drawn, n = build_methods([method], DENSITY)[method], generator(7), 3
    with closing(micro.Simulation(reducer, LAYOUT, n)) as simulation:
        scale = fitting_scale(DENSITY, NUMEL)
        steps = [simulation.step_(scale * torch.randn(n, NUMEL, generator=drawn)) for _ in range(11)]
    settled = min(reversed(steps[5:]), key=lambda stats: stats[0].num_collectives)
    sent = statistics.fmean(sum(size for _, size in stats.calls) for stats in settled)
    assert sum(size for _, size in calls_of(reducer, NUMEL, n, layout=LAYOUT)) == pytest.approx(sent, rel=0.3)


def test_powersgd_needs_shapes() -> None:
    """Matrices shrink, the rest travels whole, and with nothing to approximate there is one all-reduce."""
    layout = Layout(("matrix", "bias", "square"), ((40, 30), (30,), (20, 20)))
    left, right = 2 * 40 + 2 * 20 + 30 + 1, 2 * 30 + 2 * 20
    reducer = micro.PowerSGD(rank=2)
    assert calls_of(reducer, layout.numel, 4, layout=layout) == (("all_reduce", 4 * left), ("all_reduce", 4 * right))
    assert calls_of(reducer, 50, 4, layout=Layout.flat(50)) == (("all_reduce", 4 * 51),)
    with pytest.raises(ValueError, match="shapes: give a layout"):
        calls_of(reducer, 100, 4)


def test_the_width_of_numbers_counts() -> None:
    """A dense mean travels as it is, what is accumulated in four bytes at least."""
    assert calls_of(micro.DenseReducer(), 100, 2, element_bytes=2) == (("all_reduce", 200),)
    gather = micro.SparseReducer(micro.TopK(), DENSITY, micro.Gather())
    for width, accumulated in ((2, 4), (4, 4), (8, 8)):
        _, (_, indices), (_, values) = calls_of(gather, 1000, 2, element_bytes=width)
        assert (indices, values) == (4 * 40, accumulated * 40)


def test_ranks_that_choose_by_themselves_meet_by_chance() -> None:
    """The estimated union is between one rank's choice and all of them, and never more than there is."""
    for density, n in ((0.01, 4), (0.3, 8), (1.0, 3)):
        *_, (_, size) = calls_of(micro.SparseReducer(micro.TopK(), density), 1000, n)
        count = size / 4 - 1
        assert count == round(1000 * (1 - (1 - density) ** n))
        assert density * 1000 <= count <= min(n * density, 1) * 1000


def test_one_level_is_a_volume_of_one_group() -> None:
    volume = volume_of(TOPK, 1000, 4)
    assert volume.calls == calls_of(TOPK, 1000, 4)
    assert (volume.local_bytes, volume.place_calls, volume.num_nodes) == (0, (), 4)
    assert volume.between_bytes == sum(bytes_sent(op, size, 4) for op, size in volume.calls)


class Silent(micro.TopK):
    """A selector with requests of its own that does not say what it sends."""

    volume = micro.Selector.volume


def test_what_cannot_be_said_is_an_error() -> None:
    for match, numel, n, facts in (
        ("at least 1, got 0 and 2", 0, 2, {}),
        ("5 elements, the bucket 6", 6, 2, {"layout": Layout.flat(5)}),
        ("element_bytes .* got 3", 6, 2, {"element_bytes": 3}),
    ):
        with pytest.raises(ValueError, match=match):
            calls_of(TOPK, numel, n, **facts)
    with pytest.raises(ValueError, match=r"selector topk .* volume"):
        calls_of(micro.SparseReducer(Silent(), DENSITY), 1000, 2)
