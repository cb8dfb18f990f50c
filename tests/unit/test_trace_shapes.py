"""Shapes in a trace: what a method sends that looks at them is predicted for the whole model."""

from dataclasses import replace

import pytest

import micro
from experiments.training.schedule_problem import problem_of
from micro.planning.collectives import Link
from micro.planning.costs import Flat
from micro.planning.traces import Layer, Trace

SHAPES = {"head": (10, 64), "norm": (64,), "body": (64, 32, 3, 3)}
LAYERS = tuple(
    Layer(name, 4 * micro.Layout((name,), (shape,)).numel, 0.01 * place, shape=shape)
    for place, (name, shape) in enumerate(SHAPES.items())
)
TRACE = Trace(model="m", layers=LAYERS, forward_s=0.0, backward_s=0.1)
NETWORK = Flat(Link(0.0, 1e-6), 4)


def test_powersgd_is_predicted_from_the_shapes() -> None:
    left, right = 2 * (10 + 64) + 64 + 1, 2 * (64 + 32 * 3 * 3)  # of head and body; norm and a flag go with the first
    expected = sum(NETWORK.seconds("all_reduce", 4 * numbers) for numbers in (left, right))
    assert problem_of(TRACE, NETWORK, micro.PowerSGD(rank=2), 4).exchange(TRACE.num_bytes) == pytest.approx(
        expected, rel=0.02
    )


def test_without_all_shapes_it_cannot_be() -> None:
    unknown = replace(TRACE, layers=(*LAYERS[:-1], replace(LAYERS[-1], shape=None)))
    assert unknown.layout is None
    with pytest.raises(ValueError, match="depends on the parameters' shapes"):
        problem_of(unknown, NETWORK, micro.PowerSGD(rank=2), 4).exchange(TRACE.num_bytes)


@pytest.mark.parametrize(
    ("shape", "words"), [((3, 0), "at least 1, got 0"), ((7, 64), "no whole number"), ("64", "a list")]
)
def test_a_shape_that_cannot_be_is_refused(shape: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(TRACE, layers=(replace(LAYERS[0], shape=shape),))  # type: ignore[arg-type]
