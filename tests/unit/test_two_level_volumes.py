"""What two levels are said to send, level by level, against what their ranks count."""

import statistics
from functools import cache

import pytest
import torch

import micro
from micro.operations import OPS, PADDING, bytes_sent
from micro.planning.volumes import Calls, Volume, calls_of, volume_of
from micro.randomness import generator
from micro.zoo.fft import FFTReducer
from tests.products import grid

DENSITY = 0.05
LAYOUTS = {
    "even": micro.Layout(("a", "b"), ((16, 30), (24,))),
    "ragged": micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (7,), (11, 11))),
    "sparing": micro.Layout(("a", "b", "c"), ((2,), (1,), (2, 1))),  # of 4 ranks in a node two own nothing
}
EXACT: dict[str, micro.Reducer] = {  # what they send does not depend on the values
    "dense": micro.DenseReducer(),
    "topk+gather": micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.Gather()),
    "leader": micro.SparseReducer(micro.Leader(), DENSITY),
    "randomk": micro.SparseReducer(micro.RandomK(), DENSITY),
    "everything": micro.SparseReducer(micro.Everything(), 1.0),
    "split": micro.Split(reducer=micro.SparseReducer(micro.RandomK(), DENSITY), min_dims=2),
    "fft": FFTReducer(density=DENSITY, feedback=micro.ErrorFeedback()),
}
CLOSE: dict[str, micro.Reducer] = {
    "topk+union": micro.SparseReducer(micro.TopK(), DENSITY),
    "topk+packed": micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.Gather(), indices=micro.Packed()),
    "dsa": micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.DSA()),
    "micro": micro.SparseReducer(micro.Micro(), DENSITY),
}
SIZES = [(2, 2), (3, 2), (2, 4), (4, 3), (1, 2), (3, 1)]  # nodes, ranks of a node


@cache
def counted(
    reducer: micro.Reducer, layout: micro.Layout, size: tuple[int, int], dtype: torch.dtype
) -> list[micro.StepStats]:
    """Return what the ranks report of a late step of two levels."""
    nodes, local = size
    two_level = micro.TwoLevel(reducer=reducer, ranks_per_node=local)
    simulation, drawn = micro.Simulation(two_level, layout, nodes * local, dtype=dtype), generator(5)
    try:
        drawn_steps = [torch.randn(nodes * local, layout.numel, generator=drawn).to(dtype) for _ in range(8)]
        steps = [simulation.step_(gradients) for gradients in drawn_steps]
    finally:
        simulation.close()
    return min(reversed(steps[4:]), key=lambda stats: stats[0].num_collectives)  # one that searches for nothing


def said(reducer: micro.Reducer, layout: micro.Layout, size: tuple[int, int], stats: list[micro.StepStats]) -> Volume:
    """Return the volume of the step that ``stats`` report, its counts given."""
    nodes, local = size
    two_level = micro.TwoLevel(reducer=reducer, ranks_per_node=local)
    return volume_of(
        two_level,
        layout.numel,
        nodes * local,
        build_up=stats[0].build_up,
        local_count=statistics.fmean(stats[0].counts),
        layout=layout,
    )


def mean_of(calls: list[Calls]) -> Calls:
    """Return the calls of several ranks as one list, with the mean of their sizes."""
    assert len({tuple(op for op, _ in each) for each in calls}) == 1
    return tuple((each[0][0], statistics.fmean(size for _, size in each)) for each in zip(*calls, strict=True))


@grid(name=EXACT, layout=LAYOUTS, size=SIZES)
def test_messages_and_bytes_of_each_level_are_those_that_ranks_count(
    name: str, layout: str, size: tuple[int, int]
) -> None:
    stats = counted(EXACT[name], LAYOUTS[layout], size, torch.float32)
    volume = said(EXACT[name], LAYOUTS[layout], size, stats)
    assert volume.num_local_calls == len(stats[0].local_calls)
    assert volume.num_calls == statistics.fmean(len(each.calls) for each in stats)
    assert volume.between_bytes == pytest.approx(statistics.fmean(each.between_bytes for each in stats), rel=1e-12)
    local_bytes = statistics.fmean(each.local_bytes for each in stats)  # lists of about one length are padded
    assert local_bytes / PADDING <= volume.local_bytes <= local_bytes * (1 + 1e-12)
    for place, calls in enumerate(volume.place_calls):
        real = mean_of([each.calls for each in stats[place :: size[1]]])
        assert [op for op, _ in calls] == [op for op, _ in real]
        assert [sent for _, sent in calls] == pytest.approx([sent for _, sent in real])


@grid(name=CLOSE, layout=["even", "ragged"], size=SIZES)
def test_where_values_decide_the_bytes_of_each_level_are_near(name: str, layout: str, size: tuple[int, int]) -> None:
    stats = counted(CLOSE[name], LAYOUTS[layout], size, torch.float32)
    volume = said(CLOSE[name], LAYOUTS[layout], size, stats)
    real = mean_of([each.local_calls for each in stats])
    assert [op for op, _ in volume.local_calls] == [op for op, _ in real]
    assert volume.local_bytes == pytest.approx(statistics.fmean(each.local_bytes for each in stats), rel=0.05)
    between = statistics.fmean(each.between_bytes for each in stats)
    assert volume.between_bytes == pytest.approx(between, rel=0.15 if name == "dsa" else 0.06, abs=8)


@grid(name=EXACT, dtype=[torch.float16, torch.float64])
def test_the_width_of_gradients_counts_within_a_node(name: str, dtype: torch.dtype) -> None:
    layout, size = LAYOUTS["ragged"], (2, 2)
    stats = counted(EXACT[name], layout, size, dtype)
    volume = volume_of(
        micro.TwoLevel(reducer=EXACT[name], ranks_per_node=2),
        layout.numel,
        4,
        build_up=stats[0].build_up,
        layout=layout,
        element_bytes=dtype.itemsize,
    )
    assert volume.local_bytes == pytest.approx(statistics.fmean(each.local_bytes for each in stats))
    assert volume.between_bytes == pytest.approx(statistics.fmean(each.between_bytes for each in stats))


def test_dense_parameters_beside_two_levels_are_of_all_ranks() -> None:
    layout = LAYOUTS["ragged"]
    two_level = micro.TwoLevel(reducer=EXACT["randomk"], ranks_per_node=2)
    split = micro.Split(reducer=two_level, min_dims=2)
    with_simulation = micro.Simulation(split, layout, 4)
    try:
        stats = with_simulation.step_(torch.randn(4, layout.numel, generator=generator(3)))
    finally:
        with_simulation.close()
    volume = volume_of(split, layout.numel, 4, layout=layout)
    assert volume.calls == (("all_reduce", 4 * 7),)
    assert volume.between_bytes == pytest.approx(statistics.fmean(each.between_bytes for each in stats))
    assert volume.local_bytes == pytest.approx(statistics.fmean(each.local_bytes for each in stats))


def test_one_level_is_a_volume_of_one_group() -> None:
    reducer = CLOSE["topk+union"]
    volume = volume_of(reducer, 1000, 4)
    assert volume.calls == calls_of(reducer, 1000, 4)
    assert (volume.local_bytes, volume.place_calls, volume.num_nodes) == (0, (), 4)
    assert volume.between_bytes == sum(bytes_sent(op, size, 4) for op, size in volume.calls)


def test_an_operation_among_one_rank_sends_nothing() -> None:
    assert all(bytes_sent(op, 12.0, 1) == 0 for op in OPS if op != "scatter")


def test_mistakes_are_one_line() -> None:
    two_level = micro.TwoLevel(reducer=EXACT["randomk"], ranks_per_node=4)
    with pytest.raises(ValueError, match="ranks_per_node must divide the number of ranks, got 4 for 6 ranks"):
        volume_of(two_level, 1000, 6)
    with pytest.raises(ValueError, match=r"two_level .* calls collectives of two levels: ask for its volume_of"):
        calls_of(two_level, 1000, 8)
    with pytest.raises(ValueError, match=r"what split sends depends on .* give a layout"):
        volume_of(micro.TwoLevel(reducer=EXACT["split"], ranks_per_node=4), 1000, 8)
