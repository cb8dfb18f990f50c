"""TwoLevel: what each shard gets is the reducer's own result between nodes, and each level sends what is stated."""

import statistics
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.operations import PADDING
from micro.planning.volumes import calls_of, volume_of
from micro.reducers.node_exchange import node_shards
from micro.scope import scoped
from micro.zoo.fft import FFTReducer
from tests.products import grid

LAYOUT = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (7,), (11, 11)))
SPARING = micro.Layout(("a", "b", "c"), ((2,), (1,), (2, 1)))  # of 4 ranks in a node two own nothing
EVEN = micro.Layout(("a", "b"), ((16, 30), (24,)))
DENSITY = 0.05

METHODS: dict[str, micro.Reducer] = {
    "dense": micro.DenseReducer(),
    "topk+union": micro.SparseReducer(micro.TopK(), DENSITY),
    "topk+gather+packed": micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.Gather(), indices=micro.Packed()),
    "leader": micro.SparseReducer(micro.Leader(), DENSITY),
    "micro+half": micro.SparseReducer(micro.Micro(), DENSITY, codec=micro.Half()),
    "split": micro.Split(reducer=micro.SparseReducer(micro.Micro(), DENSITY), min_dims=2),
    "randomk": micro.SparseReducer(micro.RandomK(), DENSITY),
    "oktopk": micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.Oktopk()),
    "dgc": micro.SparseReducer(
        micro.Estimated(fit="dgc"), DENSITY, feedback=micro.MomentumCorrection(), exchange=micro.Gather()
    ),
    "fft": FFTReducer(density=DENSITY, feedback=micro.ErrorFeedback()),
}
SIZES = [(1, 2), (2, 2), (3, 2), (2, 4), (3, 1)]  # nodes, ranks per node


def of_nodes(nodes: int, step: int, layout: micro.Layout = LAYOUT, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return (nodes, numel) gradients, as means over the ranks of each node."""
    randomness = torch.Generator().manual_seed(100 * step + nodes)
    return torch.randn(nodes, layout.numel, generator=randomness, dtype=torch.float64).to(dtype)


def of_ranks(gradients: Tensor, ranks_per_node: int) -> Tensor:
    """Return (nodes * ranks_per_node, numel) gradients whose mean over each node is exact: one rank has an element."""
    owner = torch.arange(gradients.shape[1]) % ranks_per_node
    spread = [torch.where(owner == rank, ranks_per_node * gradients, 0.0) for rank in range(ranks_per_node)]
    return torch.stack(spread, 1).flatten(0, 1).to(gradients.dtype)


class Nodes(micro.Simulation):
    """A simulation of two levels that is given the gradients of nodes."""

    def __init__(
        self, reducer: micro.Reducer, size: tuple[int, int], layout: micro.Layout = LAYOUT, **more: Any
    ) -> None:
        self.nodes, self.local = size
        two_level = micro.TwoLevel(reducer=reducer, ranks_per_node=self.local)
        super().__init__(two_level, layout, self.nodes * self.local, **{"dtype": torch.float64, **more})

    def kept(self) -> Tensor:
        """Return (nodes, numel): what the ranks of each node keep together."""
        return torch.stack(self.residuals()).view(self.nodes, self.local, -1).sum(1)

    def take(self, gradients: Tensor) -> tuple[Tensor, list[micro.StepStats]]:
        """Take a step of gradients (nodes, numel); return the update and the statistics of all ranks."""
        rows = of_ranks(gradients, self.local)
        stats = self.step_(rows)
        return rows[0], stats


@grid(name=METHODS, size=SIZES)
def test_each_shard_is_reduced_between_nodes_as_by_the_reducer_alone(name: str, size: tuple[int, int]) -> None:
    nodes, local = size
    shards = [(place, shard) for place, shard in enumerate(node_shards(LAYOUT, local)) if shard]
    alone = [micro.Simulation(METHODS[name], shard.layout, nodes, dtype=torch.float64) for _, shard in shards]
    with closing(Nodes(METHODS[name], size)) as both:
        for index in range(4):
            gradients = of_nodes(nodes, index)
            update, all_stats = both.take(gradients)
            for (place, shard), simulation in zip(shards, alone, strict=True):
                expected = simulation.step(torch.stack([shard.take(row) for row in gradients]))
                assert torch.equal(shard.take(update), expected.update)
                kept = simulation.residuals()
                if kept[0].numel():
                    assert torch.equal(torch.stack([shard.take(row) for row in both.kept()]), torch.stack(kept))
                for node, stats in enumerate(expected.stats):
                    mine = all_stats[node * local + place]
                    assert mine.between_bytes == pytest.approx(stats.bytes_sent)
                    assert mine.calls == stats.calls
                    assert mine.counts[node * local + place] == stats.counts[node]
                    assert mine.bytes_sent == mine.local_bytes + mine.between_bytes
    for simulation in alone:
        simulation.close()


def test_what_is_beyond_the_range_of_float16_waits() -> None:
    with closing(Nodes(METHODS["topk+union"], (2, 2), dtype=torch.float16)) as both:
        sent = torch.zeros(LAYOUT.numel)
        for _ in range(4):  # few of the elements are sent at each step, so that more than 65,504 waits
            both.step_(rows := torch.full((4, LAYOUT.numel), 60_000.0, dtype=torch.float16))
            assert torch.isfinite(rows).all()
            sent += rows[0].float()
        assert rows[0].max() == 65_504.0
        assert (2 * sent + both.kept().sum(0) == 2 * 4 * 60_000.0).all()


def test_a_sum_that_overflows_within_a_node_is_found() -> None:
    with closing(Nodes(METHODS["micro+half"], (2, 4), dtype=torch.float32)) as both:
        rows = torch.zeros(8, LAYOUT.numel)
        rows[:, 130] = 3e38
        with pytest.raises(micro.NonFiniteGradient, match=r"mean gradient of 'a.bias' is not finite at step 0"):
            both.step_(rows)


# --- state and settings -----------------------------------------------------------------------------------------------


def test_a_shard_without_elements_names_what_the_others_keep() -> None:
    layout = micro.Layout(("x", "y"), ((1, 1), (1,)))
    for reducer in (METHODS["split"], METHODS["dgc"], micro.DenseReducer()):
        with closing(Nodes(reducer, (1, 2), layout)) as both:
            both.take(of_nodes(1, 0, layout))
            with_elements, without = (set(state.pieces()) for state in both._states)
            assert with_elements == without
            assert [kept.numel() for kept in both.residuals()] == [2 * bool(without)] * 2


def test_states_of_other_nodes_and_their_means_are_refused() -> None:
    method = METHODS["topk+union"]
    with closing(Nodes(method, (2, 2))) as both, closing(Nodes(method, (1, 4))) as other:
        both.take(of_nodes(2, 0))
        with pytest.raises(ValueError, match="two_level 2 topk"):
            other.load_state_dict(both.state_dict())
        states = [{"buckets": [bucket]} for bucket in both.state_dict()["ranks"]]
        with pytest.raises(ValueError, match="own shard of a node"):
            micro.average(states, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node .* got 0"),
        ({"reducer": micro.PowerSGD(rank=2)}, "powersgd"),
        ({"reducer": micro.Split(reducer=micro.PowerSGD(rank=2), min_dims=2)}, "split powersgd"),
        ({"reducer": micro.Micro()}, "the selector Micro"),
    ],
)
def test_what_cannot_be_exchanged_in_shards_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        micro.TwoLevel(**{"reducer": METHODS["dense"], "ranks_per_node": 2} | settings)


def test_ranks_that_do_not_fill_nodes_are_refused() -> None:
    two_level = micro.TwoLevel(reducer=METHODS["randomk"], ranks_per_node=2)
    for reducer in (two_level, micro.Split(reducer=two_level, min_dims=2)):
        with pytest.raises(ValueError, match=r"ranks_per_node .* got 2 for 3 ranks"):
            micro.Simulation(reducer, LAYOUT, 3)
    with pytest.raises(ValueError, match="got 2 for 3 ranks"):
        volume_of(two_level, 1000, 3)


def test_scopes_are_those_of_the_reducer() -> None:
    reducer = micro.TwoLevel(reducer=METHODS["topk+union"], ranks_per_node=2)
    assert scoped(reducer, "tensor") == replace(reducer, reducer=scoped(reducer.reducer, "tensor"))
    with pytest.raises(ValueError, match="two_level"):
        scoped(reducer, "model")


# --- what each level is said to send ----------------------------------------------------------------------------------

FIXED = ["dense", "leader", "randomk", "fft"]  # what they send does not depend on the values
CASES = [
    *((name, layout, dtype) for name in FIXED for layout in (LAYOUT, SPARING, EVEN) for dtype in (2, 4, 8)),
    *((name, layout, 4) for name in ("topk+union", "topk+gather+packed", "micro+half") for layout in (LAYOUT, EVEN)),
]
DTYPES = {2: torch.float16, 4: torch.float32, 8: torch.float64}


@grid(case=CASES, size=SIZES)
def test_each_level_sends_what_is_stated(case: tuple[str, micro.Layout, int], size: tuple[int, int]) -> None:
    (name, layout, width), (nodes, local) = case, size
    with closing(Nodes(METHODS[name], size, layout, dtype=DTYPES[width])) as both:
        steps = [both.step_(of_nodes(nodes * local, step, layout, DTYPES[width])) for step in range(8)]
    stats = min(reversed(steps[4:]), key=lambda stats: stats[0].num_collectives)  # one that searches for nothing
    facts = {"build_up": stats[0].build_up, "local_count": statistics.fmean(stats[0].counts), "layout": layout}
    two_level = micro.TwoLevel(reducer=METHODS[name], ranks_per_node=local)
    volume = volume_of(two_level, layout.numel, nodes * local, element_bytes=width, **facts)
    is_fixed = name in FIXED
    near = {} if is_fixed else {"rel": 0.06, "abs": 8}
    assert volume.between_bytes == pytest.approx(statistics.fmean(each.between_bytes for each in stats), **near)
    local_bytes = statistics.fmean(each.local_bytes for each in stats)  # lists of about one length are padded
    assert local_bytes / PADDING <= volume.local_bytes * (1 if is_fixed else 1.05)
    assert volume.local_bytes <= local_bytes * (1 + (1e-12 if is_fixed else 0.05))
    assert volume.num_local_calls == len(stats[0].local_calls)
    assert volume.num_calls == statistics.fmean(len(each.calls) for each in stats)
    for place, calls in enumerate(volume.place_calls):
        assert [op for op, _ in calls] == [op for op, _ in stats[place].calls]


def test_dense_parameters_beside_two_levels_are_of_all_ranks() -> None:
    two_level = micro.TwoLevel(reducer=METHODS["randomk"], ranks_per_node=2)
    split = micro.Split(reducer=two_level, min_dims=2)
    with closing(micro.Simulation(split, LAYOUT, 4)) as simulation:
        stats = simulation.step_(of_nodes(4, 0, dtype=torch.float32))
    volume = volume_of(split, LAYOUT.numel, 4, layout=LAYOUT)
    assert volume.calls == (("all_reduce", 4 * 7),)
    assert volume.between_bytes == pytest.approx(statistics.fmean(each.between_bytes for each in stats))
    assert volume.local_bytes == pytest.approx(statistics.fmean(each.local_bytes for each in stats))
    with pytest.raises(ValueError, match="two_level"):
        calls_of(two_level, 1000, 8)
