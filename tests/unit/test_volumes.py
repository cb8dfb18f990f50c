"""The predicted traffic of methods: estimates and widths. A law compares it with what ranks send."""

import pytest
import torch

import micro
from micro.comm.ranks import bytes_sent
from micro.predicted_traffic import calls_of, volume_of
from tests.parts import simulated
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


def test_densities_by_name_and_an_empty_selection_count() -> None:
    layout = micro.Layout(("embed", "w"), ((1000,), (1000,)))
    density = micro.ByName(patterns={"embed*": 0.1}, density=0.001)
    reducer = micro.SparseReducer(micro.TopK(scope="layer"), density, exchange=micro.Gather())
    assert (
        calls_of(reducer, 2000, 4, layout=layout)
        == simulated(reducer, layout, 4, dtype=torch.float32).step(torch.randn(4, 2000)).stats[0].calls
    )
    nothing = {"local_count": 0.0, "longest_count": 0.0, "build_up": 0.0}
    assert calls_of(micro.SparseReducer(micro.Threshold(value=1e9), 0.01), 4000, 4, **nothing)[1] == ("gather_lists", 0)


def test_parameters_without_elements_send_nothing() -> None:
    """As two levels make of each that is shorter than a node."""
    layout = micro.Layout(("w", "b"), ((4,), (1,)))
    tensors = micro.SparseReducer(micro.PerTensor(selector=micro.TopK()), 0.1)
    assert volume_of(micro.TwoLevel(reducer=tensors, ranks_per_node=4), 5, 8, layout=layout).local_calls
    layers = micro.SparseReducer(micro.TopK(scope="layer"), micro.ByName(patterns={"*": 1.0}, density=0.01))
    two_level = micro.TwoLevel(reducer=layers, ranks_per_node=4)
    stats = simulated(two_level, layout, 8).step(torch.randn(8, 5, dtype=torch.float64)).stats[0]
    assert (stats.target_count, stats.target_density) == (5, 1.0)
