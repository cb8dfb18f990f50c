"""What is chosen from and what travels together are two choices: neither changes what the other does."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.density.base import target_count
from micro.exchanges.base import Transport, Wire
from micro.exchanges.in_pieces import InPieces
from micro.lockstep import SimulatedRanks
from micro.randomness import seed_for
from micro.reducers.base import BucketState
from micro.requests import carried_out
from micro.selectors.per_tensor import PerTensor, PerTensorState
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step
from micro.zoo.accordion import Accordion, AccordionState
from micro.zoo.deft import Deft
from tests.products import grid

CPU, DTYPE = torch.device("cpu"), torch.float64
LAYOUT = micro.Layout(("a", "empty", "b", "one", "c"), ((6, 20), (0,), (7,), (), (90,)))
SCALES = {"a": 1.0, "b": 30.0, "one": 0.1, "c": 0.01}
DENSITY = 0.1


SELECTORS = ("exdyna", "leader", "micro", "randomk", "threshold", "topk")


def gradients(layout: micro.Layout, world_size: int, step: int) -> Tensor:
    """Return (world_size, numel) normal gradients that depend on the parameter's name, not on where it lies."""
    drawn = torch.empty(world_size, layout.numel, dtype=DTYPE)
    for name, place in layout.slices():
        randomness = torch.Generator().manual_seed(seed_for(step, name))
        shape = world_size, place.stop - place.start
        drawn[:, place] = SCALES.get(name, 1.0) * torch.randn(shape, generator=randomness, dtype=DTYPE)
    return drawn


def part_of(layout: micro.Layout, *names: str) -> micro.Layout:
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return micro.Layout(names, tuple(shapes[name] for name in names))


def start(reducer: micro.Reducer, layout: micro.Layout, world_size: int) -> list[BucketState]:
    return [reducer.start(layout, DTYPE, CPU) for _ in range(world_size)]


def reduced(
    group: SimulatedRanks, reducer: micro.Reducer, states: list[BucketState]
) -> tuple[dict[str, Tensor], micro.StepStats]:
    """Take a step; return the update by parameter name, and what rank 0 says of it."""
    grads = gradients(states[0].layout, len(states), states[0].step)

    def work(comm: Comm) -> micro.StepStats:
        comm.begin_step()
        return reducer.reduce_(states[comm.rank], grads[comm.rank], comm)

    stats = group.run(work)
    return states[0].layout.split(grads[0]), stats[0]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.fixture
def three() -> Iterator[SimulatedRanks]:
    with closing(SimulatedRanks(3)) as group:
        yield group


# --- within each tensor -----------------------------------------------------------------------------------------------


@grid(name=SELECTORS, world_size=[1, 2, 3, 5])
def test_each_parameter_gets_what_it_would_get_alone(name: str, world_size: int) -> None:
    selector = micro.build(micro.Selector, name)
    reducer = micro.SparseReducer(PerTensor(selector=selector), DENSITY, seed=5)
    together = start(reducer, LAYOUT, world_size)
    parameters = [part_of(LAYOUT, name) for name, numel in zip(LAYOUT.names, LAYOUT.numels, strict=True) if numel]
    apart = [micro.SparseReducer(selector, DENSITY, seed=seed_for(5, layout.names[0])) for layout in parameters]
    alone = [start(one, layout, world_size) for one, layout in zip(apart, parameters, strict=True)]
    with closing(SimulatedRanks(world_size)) as group:
        for _ in range(5):
            update, stats = reduced(group, reducer, together)
            each = [reduced(group, *pair) for pair in zip(apart, alone, strict=True)]
            expected = {name: part for parts, _ in each for name, part in parts.items()}
            assert_same({name: part for name, part in update.items() if part.numel()}, expected)
            assert stats.counts == tuple(map(sum, zip(*(own.counts for _, own in each), strict=True)))
            assert stats.global_count == sum(own.global_count for _, own in each)
            assert stats.target_count == sum(own.target_count for _, own in each)
            assert stats.threshold is None


@pytest.mark.parametrize("name", ["micro", "exdyna", "estimated", "leader"])
def test_buckets_change_nothing_when_each_parameter_is_chosen_from_by_itself(three: SimulatedRanks, name: str) -> None:
    settings = {"micro": {"rule": "repaired"}, "estimated": {"fit": "sidco"}}.get(name, {})
    reducer = micro.SparseReducer(PerTensor(selector={"name": name, **settings}), DENSITY)  # type: ignore[arg-type]
    whole, moved = start(reducer, LAYOUT, 3), [start(reducer, LAYOUT, 3)]
    for step in range(12):
        if step == 4:  # DDP's buckets come apart
            layouts = part_of(LAYOUT, "c", "one"), part_of(LAYOUT, "b", "empty", "a")
            moved = [[reducer.rebuild(layout, [old], DTYPE, CPU) for old in moved[0]] for layout in layouts]
        if step == 8:  # and are joined in another order
            turned = micro.Layout(LAYOUT.names[::-1], LAYOUT.shapes[::-1])
            moved = [[reducer.rebuild(turned, old, DTYPE, CPU) for old in zip(*moved, strict=True)]]
        expected, _ = reduced(three, reducer, whole)
        parts = [reduced(three, reducer, states)[0] for states in moved]
        found = {name: part for update in parts for name, part in update.items()}
        assert_same({name: found[name] for name in LAYOUT.names}, expected)


def test_states_follow_their_parameters_by_name(three: SimulatedRanks) -> None:
    reducer = micro.SparseReducer(PerTensor(selector=micro.Micro(rule="repaired")), DENSITY)
    states = start(reducer, LAYOUT, 3)
    for _ in range(3):
        reduced(three, reducer, states)
    before = reducer.selector.save(states[0].selector)
    assert set(before) == {"a", "b", "one", "c"}
    with_new = micro.Layout(("new", "c", "a"), ((3,), (90,), (6, 20)))
    moved = reducer.rebuild(with_new, [states[0]], DTYPE, CPU)
    assert reducer.selector.save(moved.selector) == {name: before[name] for name in ("c", "a")}


def test_every_parameter_is_served_whatever_its_scale(three: SimulatedRanks) -> None:
    whole, each = (
        micro.SparseReducer(selector, DENSITY) for selector in (micro.Micro(), PerTensor(selector=micro.Micro()))
    )
    starved, _ = reduced(three, whole, start(whole, LAYOUT, 3))
    served, stats = reduced(three, each, start(each, LAYOUT, 3))
    assert not starved["c"].any()
    wanted = {
        name: target_count(DENSITY, numel) if numel else 0 for name, numel in zip(served, LAYOUT.numels, strict=True)
    }
    assert {name: int(part.count_nonzero()) for name, part in served.items()} == wanted
    assert stats.target_count == stats.global_count == sum(wanted.values())
    assert stats.density_error == 0.0


def test_one_exchange_serves_all_parameters(three: SimulatedRanks) -> None:
    reducer = micro.SparseReducer(PerTensor(selector=micro.TopK()), DENSITY, exchange=micro.Gather())
    _, stats = reduced(three, reducer, start(reducer, LAYOUT, 3))
    assert [op for op, _ in stats.calls] == ["gather_rows", "gather_lists", "gather_lists"]


@pytest.mark.parametrize(
    ("selector", "density"),
    [
        (micro.TopK(), 0.29),
        (micro.TopK(scope="layer"), 0.29),
        (PerTensor(selector=micro.TopK()), 0.29),
        (PerTensor(selector=micro.TopK()), micro.ByName(patterns={"a": 0.29}, density=0.29)),
        (micro.TopK(scope="layer"), Accordion(density=0.29, high=0.29, interval=10)),
    ],
)
def test_all_ways_to_the_same_density_choose_as_many(
    selector: micro.Selector, density: Any, three: SimulatedRanks
) -> None:
    """0.29 * 100 is a little below 29 in floating point."""
    layout = micro.Layout(("a", "b"), ((100,), (100,)))
    reducer = micro.SparseReducer(selector, density, exchange=micro.Gather())
    _, stats = reduced(three, reducer, start(reducer, layout, 3))
    assert stats.target_count == 58
    assert stats.counts == (58, 58, 58)


def test_a_policy_that_differs_by_layer_goes_with_it(three: SimulatedRanks) -> None:
    layout = part_of(LAYOUT, "a", "b", "c")
    policy = Accordion(density=0.05, high=0.5, interval=100)
    reducer = micro.SparseReducer(PerTensor(selector=micro.Leader()), policy)
    states = start(reducer, layout, 3)
    for state in states:
        state.density = AccordionState((1.0, 1.0, 1.0), (False, True, False))
        state.step = 1
    update, stats = reduced(three, reducer, states)
    assert [int(part.count_nonzero()) for part in update.values()] == [6, 3, 4]
    assert stats.target_count == 13


def test_it_is_built_from_names_and_says_what_it_is() -> None:
    spec: dict[str, Any] = {"name": "per_tensor", "selector": {"name": "micro", "rule": "published"}}
    built = micro.build(micro.Selector, spec)
    assert built == PerTensor(selector=micro.Micro(rule="published"))
    assert built.overlap is Overlap.DISJOINT
    assert micro.SparseReducer(built, DENSITY).method == "per_tensor micro (published)"
    assert micro.build(micro.Selector, spec | {"selector": "leader"}).overlap is Overlap.LEADER
    with pytest.raises(ValueError, match=r"selector must be one of .*, got 'mikro'; did you mean 'micro'"):
        micro.build(micro.Selector, spec | {"selector": "mikro"})


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        (Deft(), "selector deft makes sense for all parameters together only: use it without per_tensor"),
        (micro.Everything(), "selector everything makes sense for all parameters together only"),
        (micro.TopK(scope="layer"), "selector topk looks at each parameter separately already"),
        (PerTensor(selector=micro.TopK()), "selector per_tensor topk looks at each parameter separately already"),
        (micro.RandomK(unbiased=True), "selector randomk scales the update by one factor"),
    ],
)
def test_selectors_that_make_no_sense_within_a_parameter_are_refused(selector: micro.Selector, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PerTensor(selector=selector)


def test_the_state_of_another_selector_within_is_refused() -> None:
    one, other = (micro.SparseReducer(PerTensor(selector=s), DENSITY) for s in (micro.TopK(), micro.Leader()))
    saved = one.save(one.start(LAYOUT, DTYPE, CPU))
    with pytest.raises(ValueError, match="state is of per_tensor topk, the reducer is per_tensor leader"):
        other.load(saved, DTYPE, CPU)


def test_accordion_knows_its_parameters_in_other_buckets() -> None:
    policy = Accordion(density=0.1, high=0.5, interval=10)
    reducer = micro.SparseReducer(micro.TopK(scope="layer"), policy)
    old = reducer.start(part_of(LAYOUT, "a", "b", "c"), DTYPE, CPU)
    old.density = AccordionState((1.0, 2.0, 3.0), (True, False, True))
    turned = reducer.rebuild(part_of(LAYOUT, "c", "a", "b"), [old], DTYPE, CPU)
    assert turned.density == AccordionState((3.0, 1.0, 2.0), (True, True, False))
    assert reducer.rebuild(part_of(LAYOUT, "b"), [old], DTYPE, CPU).density == AccordionState((2.0,), (False,))
    assert reducer.rebuild(part_of(LAYOUT, "b", "one"), [old], DTYPE, CPU).density == AccordionState()


def test_a_parameter_without_elements_has_no_state() -> None:
    state = PerTensorState()
    step = Step(0, 1, 0, micro.Layout(("none", "some"), ((0, 3), (4,))))
    solo = Comm()
    chosen = carried_out(PerTensor(selector=micro.Micro()).select(state, torch.arange(4.0), step, solo), solo)
    assert list(state.by_name) == ["some"]
    assert chosen.indices.tolist() == [3]
    assert chosen.threshold is not None  # one parameter has one


# --- in pieces --------------------------------------------------------------------------------------------------------

NUMEL = 40
MEETINGS = [(each, o) for each in (micro.Union(), micro.Gather(), micro.DSA()) for o in Overlap if o in each.accepts]


def choices(world_size: int, overlap: Overlap) -> list[list[int]]:
    """Return ascending indices per rank, of different lengths, some empty, that overlap as they are said to."""
    if overlap is Overlap.SAME:
        return [[1, 4, 5, 20, 38]] * world_size
    if overlap is Overlap.LEADER:
        return [[1, 4, 5, 20, 38] if rank == world_size // 2 else [] for rank in range(world_size)]
    if overlap is Overlap.DISJOINT:
        return [list(range(rank, NUMEL - 8 * rank, world_size)) if rank != 1 else [] for rank in range(world_size)]
    return [list(range(rank % 3, 5 + 4 * rank, 2)) if rank != 2 else [] for rank in range(world_size)]


def exchanged(
    kind: micro.Exchange, overlap: Overlap, world_size: int, wire: Wire | None = None, ill: int | None = None
) -> list[tuple[Exchanged, list[Any]]]:
    """Return what every rank's exchange came to, and the collectives it called."""
    chosen = choices(world_size, overlap)
    randomness = torch.Generator().manual_seed(world_size)
    acc = torch.randn(world_size, NUMEL, generator=randomness, dtype=DTYPE)

    def work(comm: Comm) -> tuple[Exchanged, list[Any]]:
        comm.begin_step()
        selection = Selection(torch.tensor(chosen[comm.rank], dtype=torch.int32), tuple(map(len, chosen)))
        step = Step(0, 1, 0, micro.Layout.flat(NUMEL), is_finite=comm.rank != ill)
        transport = Transport(comm=comm, step=step, overlap=overlap, wire=wire or Wire())
        reduction = kind.exchange(kind.start(), acc[comm.rank], selection, transport)
        return carried_out(reduction, comm), comm.traffic.calls

    with closing(SimulatedRanks(world_size)) as group:
        return group.run(work)


def dense(*parts: SparseValues) -> Tensor:
    vector = torch.zeros(NUMEL, dtype=DTYPE)
    for part in parts:
        part.add_to_(vector)
    return vector


@pytest.mark.parametrize(("each", "overlap"), MEETINGS, ids=str)
@grid(world_size=[1, 2, 3, 5], ends=[(40,), (1, 40), (4, 5, 39, 40), tuple(range(1, 41))])
def test_pieces_change_no_bit(each: micro.Exchange, overlap: Overlap, world_size: int, ends: tuple[int, ...]) -> None:
    whole = exchanged(each, overlap, world_size)
    split = exchanged(InPieces(each=each, ends=ends), overlap, world_size)
    for (expected, _), (found, _) in zip(whole, split, strict=True):
        assert torch.equal(dense(*found.update), dense(*expected.update))
        assert torch.equal(dense(found.sent), dense(expected.sent))
        assert found.counts == expected.counts
        assert found.num_updated == expected.num_updated
        assert found.is_finite


def test_indices_stay_packed_by_the_spans_they_were_chosen_from() -> None:
    layout, world_size = micro.Layout.flat(1000), 3
    grads = torch.randn(world_size, layout.numel, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
    updates, sent = [], 0.0
    for exchange in (micro.Union(), InPieces(ends=(10, 400, 700, 1000))):
        reducer = micro.SparseReducer(micro.Micro(), DENSITY, exchange=exchange, indices=micro.Bitmap())
        with closing(micro.Simulation(reducer, layout, world_size, dtype=DTYPE)) as simulation:
            steps = [simulation.step(grads) for _ in range(3)]
        updates.append(torch.stack([step.update for step in steps]))
        sent = max(stats.indices_bytes for step in steps for stats in step.stats)
    assert torch.equal(updates[0], updates[1])
    assert sent <= (world_size - 1) * (334 / 8 + 4)  # a bit for each place of the slice; a byte begun in each piece


def test_a_piece_without_indices_of_a_leader_is_not_broadcast() -> None:
    results = exchanged(InPieces(ends=(1, 6, 10, 40)), Overlap.LEADER, 3)
    for _, calls in results:
        assert [op for op, _ in calls].count("broadcast") == 2  # of four pieces
        assert [op for op, _ in calls].count("all_reduce") == 4


def test_counts_are_not_gathered_where_all_ranks_hold_the_same() -> None:
    for _, calls in exchanged(InPieces(ends=(10, 40)), Overlap.SAME, 3):
        assert [op for op, _ in calls] == ["all_reduce", "all_reduce"]


def test_rounding_is_drawn_anew_in_every_piece() -> None:
    codec, acc = micro.QSGD(), torch.linspace(0.001, 1.0, 1000, dtype=DTYPE).repeat(2)
    chosen = Selection(torch.arange(2000, dtype=torch.int32), counts=(2000,))
    step, comm, kind = Step(0, 2000, 0, micro.Layout.flat(2000)), Comm(), InPieces(ends=(1000, 2000))
    transport = Transport(comm=comm, step=step, overlap=Overlap.SAME, wire=Wire(codec))
    found = carried_out(kind.exchange(kind.start(), acc, chosen, transport), comm)
    first, second = found.sent.values.split(1000)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("numel", "piece_mb", "sizes"), [(10, 32 / 2**20, [4, 3, 3]), (3, 1e-9, [1, 1, 1]), (5, 1, [5])]
)
def test_pieces_of_so_many_mib_are_equal(numel: int, piece_mb: float, sizes: list[int]) -> None:
    pieces = InPieces(piece_mb=piece_mb).pieces(numel, 8)
    assert [stop - start for start, stop in pieces] == sizes
    assert pieces[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(pieces))


def test_ends_of_another_vector_are_refused() -> None:
    with pytest.raises(ValueError, match="ends of in_pieces must end at 7, the vector's length, got 8"):
        InPieces(ends=(3, 8)).pieces(7, 4)


def test_parts_are_checked_together_through_the_pieces() -> None:
    with pytest.raises(ValueError, match=r"exchange in_pieces gather .*with leader one rank chooses for all"):
        micro.SparseReducer(micro.Leader(), DENSITY, exchange=InPieces(each=micro.Gather(), piece_mb=1))
    reducer = micro.SparseReducer(micro.TopK(), DENSITY, exchange=InPieces(piece_mb=1))
    assert reducer.method == "topk + in_pieces union"
    assert replace(reducer, exchange=InPieces(each=micro.DSA(), piece_mb=1)).rule_name == "repaired"
