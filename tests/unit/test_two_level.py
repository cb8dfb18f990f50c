"""TwoLevel: what each shard gets is the reducer's own result between nodes, and the laws hold with nodes as ranks."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.reducers.node_shards import NodeShards
from micro.reducers.shares import share_of
from micro.requests import AllReduce, Reduction
from micro.scope import scoped
from micro.sparse import SparseValues
from micro.zoo.fft import FFTReducer
from tests.products import grid
from tests.saving import through_a_file
from tests.sparsifiers import TABLE, Row

LAYOUT = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (7,), (11, 11)))
DENSITY = 0.05
MB = 2.0**20

METHODS: dict[str, micro.Reducer] = {
    "dense": micro.DenseReducer(),
    "topk+union": micro.SparseReducer(micro.TopK(), DENSITY),
    "topk+gather+packed": micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.Gather(), indices=micro.Packed()),
    "topk+layers": micro.SparseReducer(micro.TopK(scope="layer"), DENSITY),
    "leader": micro.SparseReducer(micro.Leader(), DENSITY),
    "micro": micro.SparseReducer(micro.Micro(), DENSITY),
    "micro+half": micro.SparseReducer(micro.Micro(), DENSITY, codec=micro.Half()),
    "split": micro.Split(reducer=micro.SparseReducer(micro.Micro(), DENSITY), min_dims=2),
    "randomk": micro.SparseReducer(micro.RandomK(), DENSITY),
    "oktopk": micro.SparseReducer(micro.TopK(), DENSITY, exchange=micro.Oktopk()),
    "dgc": micro.SparseReducer(
        micro.Estimated(fit="dgc"), DENSITY, feedback=micro.MomentumCorrection(), exchange=micro.Gather()
    ),
    "fft": FFTReducer(density=DENSITY, feedback=micro.ErrorFeedback()),
}
ALONE = [
    row
    for row in TABLE
    if not row.name.startswith(("two_level", "split+two_level", "powersgd", "split+powersgd", "dct"))  # take matrices
]
CONSERVING = [name for name in METHODS if name not in ("dgc", "fft")]  # dgc adds momentum; fft rounds to the norm
SIZES = [(1, 2), (2, 2), (3, 2), (2, 4), (3, 1)]  # nodes, ranks per node


def of_nodes(nodes: int, step: int, *, layout: micro.Layout = LAYOUT, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return (nodes, numel) gradients, as means over the ranks of each node."""
    return torch.randn(
        nodes, layout.numel, generator=torch.Generator().manual_seed(100 * step + nodes), dtype=torch.float64
    ).to(dtype)


def of_ranks(gradients: Tensor, ranks_per_node: int) -> Tensor:
    """Return (nodes * ranks_per_node, numel) gradients whose mean over each node is exact: one rank has an element."""
    nodes, numel = gradients.shape
    owner = torch.arange(numel) % ranks_per_node
    spread = [torch.where(owner == rank, ranks_per_node * gradients, 0.0) for rank in range(ranks_per_node)]
    return torch.stack(spread, 1).reshape(nodes * ranks_per_node, numel).to(gradients.dtype)


@dataclass(frozen=True)
class Taken:
    """One step as nodes see it: residuals (nodes, numel) before and after, the update, the statistics of all ranks."""

    before: Tensor
    update: Tensor
    after: Tensor
    stats: list[micro.StepStats]


class Nodes:
    """A simulation of two levels that is given the gradients of nodes."""

    def __init__(
        self,
        reducer: micro.Reducer,
        size: tuple[int, int],
        *,
        layout: micro.Layout = LAYOUT,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.nodes, self.ranks_per_node = size
        two_level = micro.TwoLevel(reducer=reducer, ranks_per_node=self.ranks_per_node)
        self.simulation = micro.Simulation(two_level, layout, self.nodes * self.ranks_per_node, dtype=dtype)

    def residuals(self) -> Tensor:
        kept = self.simulation.residuals()
        if not all(each.numel() for each in kept):
            wide = torch.promote_types(self.simulation.dtype, torch.float32)
            return torch.zeros(self.nodes, self.simulation.layout.numel, dtype=wide)
        return torch.stack(kept).view(self.nodes, self.ranks_per_node, -1).sum(1)

    def step(self, gradients: Tensor) -> Taken:
        before = self.residuals()
        rows = of_ranks(gradients, self.ranks_per_node)
        stats = self.simulation.step_(rows)
        assert all(torch.equal(rows[0], row) for row in rows), "replicas drift apart"
        return Taken(before, rows[0], self.residuals(), stats)

    def close(self) -> None:
        self.simulation.close()


def shards_of(layout: micro.Layout, ranks_per_node: int) -> Iterator[tuple[int, micro.Layout, Tensor]]:
    """Yield each shard that has elements: its place, its layout and its indices in the vector."""
    shards = NodeShards(layout, ranks_per_node)
    for place, numel in enumerate(shards.numels):
        own = shards.layout(place)
        if own is not None:
            yield place, own, shards.positions(place, torch.arange(numel))


# --- the reducer's own result -----------------------------------------------------------------------------------------


@grid(name=METHODS, size=SIZES)
def test_each_shard_is_reduced_between_nodes_as_by_the_reducer_alone(name: str, size: tuple[int, int]) -> None:
    nodes, ranks_per_node = size
    alone = [
        (place, positions, micro.Simulation(METHODS[name], layout, nodes, dtype=torch.float64))
        for place, layout, positions in shards_of(LAYOUT, ranks_per_node)
    ]
    with closing(Nodes(METHODS[name], size)) as both:
        for index in range(4):
            gradients = of_nodes(nodes, index)
            taken = both.step(gradients)
            for place, positions, simulation in alone:
                expected = simulation.step(gradients[:, positions], residuals=True)
                assert torch.equal(taken.update[positions], expected.update)
                if METHODS[name].start(LAYOUT, torch.float64, positions.device).residual.numel():
                    torch.testing.assert_close(
                        taken.after[:, positions], torch.stack(simulation.residuals()), rtol=0, atol=0
                    )
                for node, stats in enumerate(expected.stats):
                    mine = taken.stats[node * ranks_per_node + place]
                    assert mine.between_bytes == pytest.approx(stats.bytes_sent)
                    assert mine.calls == stats.calls
                    assert mine.counts[node * ranks_per_node + place] == stats.counts[node]
    for _, _, simulation in alone:
        simulation.close()


@grid(row=ALONE)
def test_nodes_of_one_rank_are_the_reducer_alone(row: Row) -> None:
    alone, world_size = row.make(DENSITY, 0), 3
    both = micro.TwoLevel(reducer=alone, ranks_per_node=1)
    one, other = (micro.Simulation(reducer, LAYOUT, world_size, dtype=torch.float64) for reducer in (alone, both))
    with closing(one), closing(other):
        for index in range(4):
            gradients = of_nodes(world_size, index)
            expected, taken = one.step(gradients, residuals=True), other.step(gradients, residuals=True)
            assert torch.equal(taken.update, expected.update)
            assert torch.equal(taken.residuals, expected.residuals)  # type: ignore[arg-type]
            for mine, theirs in zip(taken.stats, expected.stats, strict=True):
                assert (mine.counts, mine.target_count) == (theirs.counts, theirs.target_count)
                assert (mine.calls, mine.bytes_sent) == (theirs.calls, theirs.bytes_sent)
                assert mine.local_bytes == 0


@grid(name=CONSERVING, size=SIZES)
def test_nothing_of_a_nodes_gradient_is_lost(name: str, size: tuple[int, int]) -> None:
    nodes, _ = size
    with closing(Nodes(METHODS[name], size)) as both:
        for index in range(4):
            gradients = of_nodes(nodes, index)
            taken = both.step(gradients)
            lost = (taken.before + gradients).sum(0) - taken.after.sum(0) - nodes * taken.update
            assert lost.abs().max() < 1e-12


@grid(name=["topk+union", "micro", "micro+half", "split"], dtype=[torch.bfloat16, torch.float16])
def test_the_rounding_of_half_precision_gradients_stays_in_the_residuals(name: str, dtype: torch.dtype) -> None:
    with closing(Nodes(METHODS[name], (3, 2), dtype=dtype)) as both:
        for index in range(4):
            gradients = of_nodes(3, index, dtype=dtype)
            taken = both.step(gradients)
            assert taken.update.dtype == dtype
            assert taken.after.dtype == torch.float32
            acc = (taken.before + gradients.float()).sum(0)
            lost = acc - taken.after.sum(0) - 3 * taken.update.float()
            if name == "split":  # which keeps nothing of dense parameters
                lost = torch.cat([piece for key, piece in LAYOUT.split(lost).items() if key != "a.bias"])
            assert lost.abs().max() < 1e-5


def test_what_is_beyond_the_range_of_float16_waits() -> None:
    with closing(Nodes(METHODS["topk+union"], (2, 2), dtype=torch.float16)) as both:
        sent = torch.zeros(LAYOUT.numel)
        for _ in range(4):  # few of the elements are sent at each step, so that more than 65,504 waits
            both.simulation.step_(rows := torch.full((4, LAYOUT.numel), 60_000.0, dtype=torch.float16))
            assert torch.isfinite(rows).all()
            sent += rows[0].float()
        assert rows[0].max() == 65_504.0
        assert (2 * sent + both.residuals().sum(0) == 2 * 4 * 60_000.0).all()


def test_a_share_finds_its_values_in_those_of_the_vector() -> None:
    share = share_of(LAYOUT, lambda name, shape: name != "a.bias")
    assert share is not None
    whole = of_nodes(1, 0)[0]
    indices = torch.randperm(LAYOUT.numel, generator=torch.Generator().manual_seed(0))[:100].sort().values
    part = share.part_of(SparseValues(indices.to(torch.int32), whole[indices]))
    assert torch.equal(share.take(whole)[part.indices], part.values)
    assert part.indices.numel() == int(((indices < 128) | (indices >= 135)).sum())


def test_statistics_count_both_levels() -> None:
    with closing(Nodes(METHODS["topk+union"], (3, 2))) as both:
        stats = both.step(of_nodes(3, 0)).stats
        taken = both.step(of_nodes(3, 1))
    numels = NodeShards(LAYOUT, 2).numels
    for rank, mine in enumerate(taken.stats):
        place = rank % 2
        pairs = int(taken.update[next(p for at, _, p in shards_of(LAYOUT, 2) if at == place)].count_nonzero())
        assert mine.step == 1
        assert len(mine.counts) == 6
        assert mine.local_count == mine.counts[rank]
        assert mine.global_count == int(taken.update.count_nonzero())
        assert mine.local_bytes == 8 * numels[1 - place] + 4 * (4 + 3) + (4 + 8) * pairs
        assert mine.bytes_sent == mine.local_bytes + mine.between_bytes
        assert mine.num_collectives == len(mine.calls) + 4
    assert len({(s.counts, s.global_count, s.target_count) for s in taken.stats}) == 1
    assert [s.step for s in stats] == [0] * 6


def test_a_dense_update_goes_through_the_node_as_whole_shards() -> None:
    with closing(Nodes(micro.DenseReducer(), (2, 2))) as both:
        taken = both.step(of_nodes(2, 0))
    numels = NodeShards(LAYOUT, 2).numels
    torch.testing.assert_close(taken.update, of_nodes(2, 0).mean(0))
    for rank, stats in enumerate(taken.stats):
        assert stats.local_bytes == 8 * numels[1 - rank % 2] + 4 * (4 + 2) + 8 * numels[rank % 2]


@grid(name=CONSERVING, numel=[1, 2, 3, 5])
def test_fewer_elements_than_ranks(name: str, numel: int) -> None:
    layout = micro.Layout(("x",), ((numel, 1),))
    with closing(Nodes(METHODS[name], (2, 4), layout=layout)) as both:
        for index in range(3):
            gradients = of_nodes(2, index, layout=layout)
            taken = both.step(gradients)
            lost = (taken.before + gradients).sum(0) - taken.after.sum(0) - 2 * taken.update
            assert lost.abs().max() < 1e-12


# --- NaN and Inf ------------------------------------------------------------------------------------------------------


@grid(name=METHODS, value=[float("nan"), float("inf")])
def test_a_bad_gradient_stops_all_ranks_with_the_same_words(name: str, value: float) -> None:
    with closing(Nodes(METHODS[name], (2, 2))) as both:
        both.step(of_nodes(2, 0))
        gradients = of_nodes(2, 1)
        gradients[1, 130] = value  # of a.bias, at rank 2
        with pytest.raises(micro.NonFiniteGradient, match=r"'a.bias' on rank 2 is not finite at step 1"):
            both.step(gradients)
        taken = both.step(of_nodes(2, 2))
    assert torch.isfinite(taken.update).all()


@grid(name=CONSERVING)
def test_a_skipped_step_keeps_what_is_finite(name: str) -> None:
    reducer = replace(METHODS[name], nonfinite="skip")  # type: ignore[type-var]
    with closing(Nodes(reducer, (2, 2))) as both:
        both.step(of_nodes(2, 0))
        gradients = of_nodes(2, 1)
        gradients[1, 130] = float("nan")
        taken = both.step(gradients)
        good = both.step(of_nodes(2, 2))
    assert not taken.update.any()
    assert all(stats.skipped for stats in taken.stats)
    if name not in ("dense", "split"):
        assert torch.equal(taken.after, taken.before + gradients.nan_to_num(0.0))
    assert not any(stats.skipped for stats in good.stats)
    assert good.update.any()


def test_a_sum_that_overflows_within_a_node_is_found() -> None:
    gradients = torch.zeros(2, LAYOUT.numel)
    gradients[:, 130] = 1e38
    with closing(Nodes(METHODS["micro"], (2, 4), dtype=torch.float32)) as both:
        rows = of_ranks(gradients, 4)
        rows[:, 130] = 3e38
        with pytest.raises(micro.NonFiniteGradient, match=r"mean gradient of 'a.bias' is not finite at step 0"):
            both.simulation.step_(rows)


# --- state ------------------------------------------------------------------------------------------------------------


@grid(name=METHODS, size=[(2, 2), (1, 2)])
def test_save_and_restore_equals_the_uninterrupted_run(name: str, size: tuple[int, int]) -> None:
    with closing(Nodes(METHODS[name], size)) as both:
        for index in range(3):
            both.step(of_nodes(size[0], index))
        saved = both.simulation.state_dict()
        uninterrupted = [both.step(of_nodes(size[0], index)) for index in range(3, 6)]
    with closing(Nodes(METHODS[name], size)) as again:
        again.simulation.load_state_dict(through_a_file(saved))
        for index, expected in zip(range(3, 6), uninterrupted, strict=True):
            taken = again.step(of_nodes(size[0], index))
            assert torch.equal(taken.update, expected.update)
            assert torch.equal(taken.after, expected.after)
            assert [s.counts for s in taken.stats] == [s.counts for s in expected.stats]


def test_new_buckets_keep_every_residual_at_its_rank() -> None:
    reducer = micro.TwoLevel(reducer=METHODS["micro"], ranks_per_node=2)
    turned = micro.Layout(LAYOUT.names[::-1], LAYOUT.shapes[::-1])
    with closing(Nodes(METHODS["micro"], (2, 2))) as both:
        both.step(of_nodes(2, 0))
        before = [LAYOUT.split(residual) for residual in both.simulation.residuals()]
        states = list(both.simulation._states)
        both.simulation.rebuild(turned)
        for rank, residual in enumerate(both.simulation.residuals()):
            assert all(torch.equal(piece, before[rank][name]) for name, piece in turned.split(residual).items())
        taken = both.step(of_nodes(2, 1, layout=turned))
        assert taken.stats[0].step == 1
    for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True):
        part = reducer.rebuild(micro.Layout((name,), (shape,)), [states[1]], torch.float64, torch.device("cpu"))
        assert torch.equal(part.residual, before[1][name])


def test_a_state_of_nodes_of_another_size_is_refused() -> None:
    with closing(Nodes(METHODS["micro"], (2, 2))) as both, closing(Nodes(METHODS["micro"], (1, 4))) as other:
        both.step(of_nodes(2, 0))
        with pytest.raises(ValueError, match="state is of two_level 2 micro"):
            other.simulation.load_state_dict(both.simulation.state_dict())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_nodes_must_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match="ranks_per_node must divide the number of ranks, got 2 for 3 ranks"):
        micro.Simulation(micro.TwoLevel(reducer=METHODS["micro"], ranks_per_node=2), LAYOUT, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node must be a number of at least 1, got 0"),
        (
            {"reducer": micro.PowerSGD(rank=2)},
            "powersgd needs them whole: give a SparseReducer, or use powersgd without",
        ),
        (
            {"reducer": micro.Split(reducer=micro.PowerSGD(rank=2), min_dims=2)},
            "two_level cuts matrices into shards, split powersgd needs them whole",
        ),
        ({"reducer": micro.Micro()}, "must be a micro.Reducer, got the selector Micro: wrap it"),
    ],
)
def test_what_cannot_be_exchanged_in_shards_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        micro.TwoLevel(**{"reducer": METHODS["micro"], "ranks_per_node": 2} | settings)


def test_scopes_are_those_of_the_reducer() -> None:
    reducer = micro.TwoLevel(reducer=METHODS["topk+union"], ranks_per_node=2)
    assert scoped(reducer, "tensor") == replace(reducer, reducer=scoped(reducer.reducer, "tensor"))
    with pytest.raises(ValueError, match="two_level cuts each into shards: use scope=bucket or tensor"):
        scoped(reducer, "model")


def test_a_shard_without_elements_names_what_the_others_keep() -> None:
    layout = micro.Layout(("x", "y"), ((1, 1), (1,)))
    for reducer in (METHODS["split"], METHODS["dgc"], micro.DenseReducer()):
        with closing(Nodes(reducer, (1, 2), layout=layout)) as both:
            both.step(of_nodes(1, 0, layout=layout))
            with_elements, without = (set(state.pieces()) for state in both.simulation._states)
            assert with_elements == without
            assert [kept.numel() for kept in both.simulation.residuals()] == [2 * bool(without)] * 2


def test_states_of_shards_have_no_mean_over_ranks() -> None:
    with closing(Nodes(METHODS["micro"], (2, 2))) as both:
        both.step(of_nodes(2, 0))
        states = [{"buckets": [bucket]} for bucket in both.simulation.state_dict()["ranks"]]
    with pytest.raises(ValueError, match="states hold each rank's own shard of a node"):
        micro.average(states, 2)


def test_parameters_that_are_dense_leave_two_levels_for_the_others() -> None:
    split = micro.Split(reducer=micro.TwoLevel(reducer=METHODS["micro"], ranks_per_node=2), min_dims=2)
    with pytest.raises(ValueError, match="got 2 for 3 ranks"):
        micro.Simulation(split, LAYOUT, 3)
    with closing(micro.Simulation(split, LAYOUT, 4, dtype=torch.float64)) as simulation:
        for index in range(3):
            gradients = of_nodes(4, index)
            before = torch.stack(simulation.residuals()).sum(0) if index else torch.zeros(LAYOUT.numel)
            taken = simulation.step(gradients, residuals=True)
            assert taken.residuals is not None
            acc = before + gradients.sum(0) / 2  # of two nodes, as means over two ranks
            assert (acc - taken.residuals.sum(0) - 2 * taken.update).abs().max() < 1e-12


def test_a_rank_that_fails_ends_the_collectives_of_its_node() -> None:
    with closing(Nodes(METHODS["micro"], (2, 2))) as both:

        def fail(comm: Comm) -> Reduction[None]:
            levels = comm.levels(2, torch.device("cpu"))
            if comm.rank == 3:
                raise RuntimeError("this rank fails")
            yield AllReduce(mine=torch.ones(1), comm=levels.within)
            yield AllReduce(mine=torch.ones(1), comm=levels.between)

        ranks = both.simulation._ranks
        with pytest.raises(RuntimeError, match="this rank fails"):
            ranks.carry_out([fail(comm) for comm in ranks.comms])
        first, second = (both.step(of_nodes(2, index)) for index in range(2))
    for one, other in pairwise((first, second)):
        assert other.stats[0].step == one.stats[0].step + 1
