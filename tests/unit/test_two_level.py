"""TwoLevel: what each shard gets is the reducer's own result between nodes, and each level sends what is stated."""

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.ranks import PADDING
from micro.predicted_traffic import volume_of
from micro.reducers.node_exchange import node_shards
from micro.zoo.fft import FFTReducer
from tests.parts import kept, normal, simulated
from tests.products import grid
from tests.refusals import refused

LAYOUT = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (7,), (11, 11)))
SPARING = micro.Layout(("a", "b", "c"), ((2,), (1,), (2, 1)))  # with 4 ranks in a node, two own nothing
EVEN = micro.Layout(("a", "b"), ((16, 30), (24,)))
DENSITY, GATHER = 0.05, micro.Gather()


def sparse(selector: micro.Selector[Any], **parts: Any) -> micro.SparseReducer:
    return micro.SparseReducer(selector, DENSITY, **parts)


METHODS: dict[str, micro.Reducer] = {
    "dense": micro.DenseReducer(),
    "topk+union": sparse(micro.TopK()),
    "topk+gather+packed": sparse(micro.TopK(), exchange=GATHER, indices=micro.Packed()),
    "leader": sparse(micro.Leader()),
    "micro+half": sparse(micro.Micro(), codec=micro.Half()),
    "split": micro.Split(reducer=sparse(micro.Micro()), min_dims=2),
    "randomk": sparse(micro.RandomK()),
    "oktopk": sparse(micro.TopK(), exchange=micro.Oktopk()),
    "dgc": sparse(micro.Estimated(fit="dgc"), feedback=micro.MomentumCorrection(), exchange=GATHER),
    "fft": FFTReducer(density=DENSITY, feedback=micro.ErrorFeedback()),
}
FIXED = ("dense", "leader", "randomk", "fft")  # what they send does not depend on the values
SIZES = [(1, 2), (2, 2), (3, 2), (2, 4), (3, 1)]  # nodes, ranks per node


def between(name: str, size: tuple[int, int], layout: micro.Layout = LAYOUT, **more: Any) -> micro.Simulation:
    nodes, local = size
    return simulated(micro.TwoLevel(reducer=METHODS[name], ranks_per_node=local), layout, nodes * local, **more)


def by_node(simulation: micro.Simulation, size: tuple[int, int]) -> Tensor:
    """Return (nodes, numel): what the ranks of each node keep together."""
    return kept(simulation).unflatten(0, size).sum(1)


def of_ranks(gradients: Tensor, local: int) -> Tensor:
    """Return (nodes * local, numel) gradients whose mean over each node is exact: one rank has an element."""
    owner = torch.arange(gradients.shape[1]) % local
    spread = [torch.where(owner == rank, local * gradients, 0.0) for rank in range(local)]
    return torch.stack(spread, 1).flatten(0, 1)


@grid(name=METHODS, size=SIZES)
def test_each_shard_is_reduced_between_nodes_as_by_the_reducer_alone(name: str, size: tuple[int, int]) -> None:
    nodes, local = size
    shards = [(place, shard) for place, shard in enumerate(node_shards(LAYOUT, local)) if shard]
    alone = [simulated(METHODS[name], shard.layout, nodes) for _, shard in shards]
    both = between(name, size)
    for index in range(4):
        gradients = normal(nodes, LAYOUT.numel, seed=index)
        found = both.step(of_ranks(gradients, local))
        for (place, shard), simulation in zip(shards, alone, strict=True):
            expected = simulation.step(torch.stack([shard.take(row) for row in gradients]))
            assert torch.equal(shard.take(found.update), expected.update)
            if simulation.residuals()[0].numel():
                assert torch.equal(torch.stack([shard.take(row) for row in by_node(both, size)]), kept(simulation))
            for node, stats in enumerate(expected.stats):
                mine = found.stats[node * local + place]
                assert mine.between_bytes == pytest.approx(stats.bytes_sent)
                assert mine.calls == stats.calls
                assert mine.counts[node * local + place] == stats.counts[node]
                assert mine.bytes_sent == mine.local_bytes + mine.between_bytes


def test_a_sum_that_overflows_within_a_node_is_found() -> None:
    rows = torch.zeros(8, LAYOUT.numel)
    rows[:, 130] = 3e38
    both = between("micro+half", (2, 4), dtype=torch.float32)
    refused(lambda: both.step(rows), "mean gradient of 'a.bias'", "step 0", error=micro.NonFiniteGradient)


def test_states_of_other_nodes_and_their_means_are_refused() -> None:
    both, other = (between("topk+union", size) for size in ((2, 2), (1, 4)))
    both.step(normal(4, LAYOUT.numel))
    saved = both.state_dict()
    refused(lambda: other.load_state_dict(saved), "state", "two_level 2 topk")
    refused(lambda: micro.average([{"buckets": [rank]} for rank in saved["ranks"]], 2), "own shard of a node")


DTYPES = {2: torch.float16, 4: torch.float32, 8: torch.float64}


@pytest.mark.slow
@grid(name=FIXED, layout=[LAYOUT, SPARING, EVEN], width=[2, 4, 8], size=SIZES)
def test_each_level_sends_what_is_stated(name: str, layout: micro.Layout, width: int, size: tuple[int, int]) -> None:
    check_traffic(name, layout, DTYPES[width], size)


@pytest.mark.slow
@grid(name=["topk+union", "topk+gather+packed", "micro+half"], layout=[LAYOUT, EVEN], size=SIZES)
def test_each_level_sends_about_what_is_expected(name: str, layout: micro.Layout, size: tuple[int, int]) -> None:
    check_traffic(name, layout, torch.float32, size, within=0.06)


def check_traffic(
    name: str, layout: micro.Layout, dtype: torch.dtype, size: tuple[int, int], within: float | None = None
) -> None:
    both, world_size = between(name, size, layout, dtype=dtype), size[0] * size[1]
    steps = [
        both.step(normal(world_size, layout.numel, seed=100 * step + world_size, dtype=dtype)).stats
        for step in range(8)
    ]
    stats = min(reversed(steps[4:]), key=lambda stats: stats[0].num_collectives)  # one that searches for nothing
    facts = {"build_up": stats[0].build_up, "local_count": statistics.fmean(stats[0].counts), "layout": layout}
    volume = volume_of(both.reducer, layout.numel, world_size, element_bytes=dtype.itemsize, **facts)
    near = {"rel": within, "abs": 8} if within else {}
    assert volume.between_bytes == pytest.approx(statistics.fmean(each.between_bytes for each in stats), **near)
    local_bytes = statistics.fmean(each.local_bytes for each in stats)  # lists of about one length are padded
    assert local_bytes / PADDING <= volume.local_bytes * (1.05 if within else 1)
    assert volume.local_bytes <= local_bytes * (1.05 if within else 1 + 1e-12)
    assert volume.num_local_calls == len(stats[0].local_calls)
    assert volume.num_calls == statistics.fmean(len(each.calls) for each in stats)
    for place, calls in enumerate(volume.place_calls):
        assert [op for op, _ in calls] == [op for op, _ in stats[place].calls]


def test_dense_parameters_with_two_levels_are_averaged_over_all_ranks() -> None:
    split = micro.Split(reducer=micro.TwoLevel(reducer=METHODS["randomk"], ranks_per_node=2), min_dims=2)
    stats = simulated(split, LAYOUT, 4, dtype=torch.float32).step(normal(4, LAYOUT.numel, dtype=torch.float32)).stats
    volume = volume_of(split, LAYOUT.numel, 4, layout=LAYOUT)
    assert volume.calls == (("all_reduce", 4 * 7),)
    assert volume.between_bytes == pytest.approx(statistics.fmean(each.between_bytes for each in stats))
    assert volume.local_bytes == pytest.approx(statistics.fmean(each.local_bytes for each in stats))


def test_bins_and_dense_elements_of_what_is_inside_are_counted() -> None:
    layout, grads = micro.Layout(("w", "b"), ((100, 40), (500,))), normal(4, 4500, seed=1)
    fft, topk = FFTReducer(density=0.1), micro.SparseReducer(micro.TopK(), 0.01)
    stats = simulated(micro.TwoLevel(reducer=fft, ranks_per_node=2), layout, 4).step(grads).stats[0]
    assert stats.num_bins is not None
    assert stats.target_density == pytest.approx(0.1, rel=0.01)
    split = micro.Split(reducer=topk, min_dims=2)
    stats = simulated(micro.TwoLevel(reducer=split, ranks_per_node=2), layout, 4).step(grads).stats[0]
    assert stats.dense_numel == 500
    stats = simulated(micro.Split(reducer=fft, min_dims=2), layout, 4).step(grads).stats[0]
    assert stats.target_density == stats.target_count / stats.num_choices
