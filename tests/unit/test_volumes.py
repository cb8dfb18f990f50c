"""What a method is said to send: estimates and widths. That it is what ranks send is a law."""

import pytest

import micro
from micro.operations import bytes_sent
from micro.planning.volumes import calls_of, volume_of
from tests.refusals import refused

DENSITY = 0.04


def test_the_width_of_numbers_counts() -> None:
    """A dense mean travels as it is, what is accumulated in four bytes at least."""
    assert calls_of(micro.DenseReducer(), 100, 2, element_bytes=2) == (("all_reduce", 200),)
    gather = micro.SparseReducer(micro.TopK(), DENSITY, micro.Gather())
    for width, accumulated in ((2, 4), (4, 4), (8, 8)):
        _, (_, indices), (_, values) = calls_of(gather, 1000, 2, element_bytes=width)
        assert (indices, values) == (4 * 40, accumulated * 40)


@pytest.mark.parametrize(("density", "n"), [(0.01, 4), (0.3, 8), (1.0, 3)])
def test_ranks_that_choose_by_themselves_meet_by_chance(density: float, n: int) -> None:
    *_, (_, size) = calls_of(micro.SparseReducer(micro.TopK(), density), 1000, n)
    assert size / 4 - 1 == round(1000 * (1 - (1 - density) ** n))


def test_one_level_is_a_volume_of_one_group() -> None:
    reducer = micro.SparseReducer(micro.TopK(), DENSITY)
    volume = volume_of(reducer, 1000, 4)
    assert volume.calls == calls_of(reducer, 1000, 4)
    assert (volume.local_bytes, volume.place_calls, volume.num_nodes) == (0, (), 4)
    assert volume.between_bytes == sum(bytes_sent(op, size, 4) for op, size in volume.calls)


class Silent(micro.TopK):
    """A selector with requests of its own that does not say what it sends."""

    volume = micro.Selector.volume


def test_a_part_that_does_not_say_what_it_sends_is_named() -> None:
    refused(lambda: calls_of(micro.SparseReducer(Silent(), DENSITY), 1000, 2), "volume", "selector topk")
