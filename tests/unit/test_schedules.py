"""Schedules against brute force over all groupings, and against their publications written out again."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch.distributed import _compute_bucket_assignment_by_size

from experiments.planning.schedules.base import Ends, Plan, Problem, Schedule, Seconds, groups_of, no_time, timeline
from experiments.planning.schedules.exact import Exact, SparseExact
from experiments.planning.schedules.greedy import MgWfbp
from experiments.planning.tables import Curve
from experiments.planning.traces import Layer, Trace
from micro.parts import build, known
from tests.refusals import refused

MIB = 2**20
ALL = sorted(known(Schedule))


def trace_of(ready: list[float], sizes: list[int], *, after: float = 0.0, **more: Any) -> Trace:
    layers = [Layer(f"layer{i}", size, time) for i, (size, time) in enumerate(zip(sizes, ready, strict=True))]
    times = {"forward_s": 1.0, "backward_s": ready[-1] + after, "element_bytes": 1, **more}
    return Trace(model="test", layers=tuple(layers), **times)


def affine(start_up: float, per_byte: float) -> Seconds:
    return lambda num_bytes: start_up + per_byte * num_bytes


def draw_trace(rng: random.Random, num_layers: int) -> Trace:
    """Draw layers whose sizes and times differ by orders of magnitude; some come together."""
    ready, clock = [], 0.0
    for _ in range(num_layers):
        clock += rng.choice((0.0, rng.expovariate(1.0), rng.expovariate(8.0)))
        ready.append(clock)
    sizes = [int(10 ** rng.uniform(0, 3)) for _ in range(num_layers)]
    return trace_of(ready, sizes, after=rng.choice((0.0, rng.expovariate(1.0))))


def draw_cost(rng: random.Random) -> Seconds:
    """Draw what an exchange costs: affine, concave, measured in pieces, or with jumps up and down."""
    start_up, per_byte = rng.expovariate(1.0), rng.expovariate(400.0)
    sizes = tuple(sorted(rng.sample(range(1, 4000), 4)))
    curve = Curve(sizes=sizes, seconds=tuple(rng.expovariate(1.0) for _ in sizes))
    return rng.choice(
        (
            affine(start_up, per_byte),
            lambda size: start_up + per_byte * size**0.7,
            curve.at,
            lambda size: start_up * (1 + size % 3) + per_byte * 64 * math.ceil(size / 64),
        )
    )


def draw(seed: int, num_layers: int, *, sparse: bool) -> Problem:
    rng = random.Random(seed)
    trace, exchange = draw_trace(rng, num_layers), draw_cost(rng)
    if not sparse:
        return Problem(trace, exchange)
    fixed, slope, convex = (rng.choice((0.0, rng.expovariate(2.0))), rng.expovariate(2000.0), rng.random() < 0.5)
    return Problem(trace, exchange, lambda size: fixed + slope * size * (math.log2(size + 1) if convex else 1))


def groupings(num_layers: int) -> Iterator[Ends]:
    for count in range(num_layers):
        for cuts in combinations(range(1, num_layers), count):
            yield (*cuts, num_layers)


def end_s(problem: Problem, ends: Ends) -> float:
    return timeline(problem, ends).end_s


# --- every schedule, and the step itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_schedule_puts_every_layer_into_one_group(name: str) -> None:
    """Free communication leaves the time of computation."""
    for num_layers, sparse, seed in product([1, 2, 7], [False, True], range(5)):
        problem = draw(seed, num_layers, sparse=sparse)
        plan = build(Schedule, name).plan(problem)
        assert [layer for group in plan.groups for layer in group] == [layer.name for layer in problem.trace.layers]
        assert sum(plan.num_bytes) == problem.trace.num_bytes
        assert plan.step_s is not None
        assert plan.step_s >= problem.trace.compute_s - 1e-12
        free = build(Schedule, name).plan(Problem(problem.trace, no_time))
        assert free.step_s == pytest.approx(problem.trace.compute_s)


def test_a_step_by_hand() -> None:
    trace = trace_of([1.0, 2.0, 4.0], [10, 20, 40], after=0.5, update_s=0.25)
    step = timeline(Problem(trace, affine(1.0, 0.1), select=lambda size: size / 100), (2, 3))
    first, second = step.transfers
    assert (first.select_s, first.sent_s, first.done_s) == pytest.approx((2.3, 2.3, 6.3))
    assert (second.select_s, second.sent_s, second.done_s) == pytest.approx((4.7, 6.3, 11.3))
    assert step.backward_s == pytest.approx(4.5 + 0.7)
    assert (step.end_s, step.exposed_s, step.step_s) == pytest.approx((11.3, 11.3 - 5.2, 1.0 + 11.3 + 0.25))


# --- the best there is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("num_layers", "seeds"), [(1, 3), (2, 30), (5, 60), (8, 40)])
def test_the_exact_schedules_find_the_best_of_all_groupings(num_layers: int, seeds: int, sparse: bool) -> None:
    for seed in range(seeds):
        problem = draw(seed, num_layers, sparse=sparse)
        best = min(end_s(problem, ends) for ends in groupings(num_layers))
        for schedule in (SparseExact(),) if sparse else (SparseExact(), Exact()):
            assert end_s(problem, schedule.cut(problem)) == pytest.approx(best, rel=1e-12)


# --- the rule that decides about two neighbours -----------------------------------------------------------------------


def draw_binary(rng: random.Random, num_layers: int) -> tuple[Trace, float, float]:
    """Draw times and costs whose sums are exact in floating point, ties included."""
    clock, ready = 0.0, []
    for _ in range(num_layers):
        clock += rng.randrange(0, 16) / 8
        ready.append(clock)
    sizes = [rng.choice((8, 64, 512)) for _ in range(num_layers)]
    return trace_of(ready, sizes), rng.randrange(0, 32) / 8, rng.choice((0.0, 2**-9, 2**-6))


def published(trace: Trace, exchange: Seconds) -> Ends:
    """MG-WFBP's procedure: layers count down to 1, all clocks are computed anew after each merge."""
    count = len(trace.layers)
    ready = [0.0, *(layer.ready_s for layer in trace.layers)]
    backward = {count - i: ready[i + 1] - ready[i] for i in range(count)}
    size = {count - i: layer.num_bytes for i, layer in enumerate(trace.layers)}
    merged = set()

    def wait_of(layer: int) -> float:
        """Return how long a layer waits for the lane after it was computed."""
        clock = lane = 0.0
        for each in range(count, 0, -1):
            if each in merged:
                continue
            clock += backward[each]
            if each == layer:
                return max(lane, clock) - clock
            lane = max(lane, clock) + exchange(size[each])
        raise AssertionError("it was merged")

    for layer in range(count, 1, -1):
        mine, following = size[layer], size[layer - 1]
        saved = exchange(mine) + exchange(following) - exchange(mine + following)
        if backward[layer - 1] - wait_of(layer) < saved:
            backward[layer - 1] += backward[layer]
            size[layer - 1] += mine
            merged.add(layer)
    return tuple(count - layer + 1 for layer in range(count, 0, -1) if layer not in merged)


def test_the_rule_makes_the_published_groups() -> None:
    rng, sizes = random.Random(1), set()
    for _ in range(300):
        trace, start_up, per_byte = draw_binary(rng, rng.randrange(1, 20))
        problem = Problem(trace, affine(start_up, per_byte), affine(0.5, 2**-8))  # a selection makes no difference
        ends = MgWfbp().cut(problem)
        assert ends == published(trace, problem.exchange)
        sizes.add(len(ends))
    assert len(sizes) > 5


def test_mgwfbp_does_not_merge_at_a_loss() -> None:
    """Where one message costs more than two."""
    curve = Curve(sizes=(0, MIB, 2 * MIB), seconds=(1e-4, 0.010, 0.021))
    problem = Problem(trace_of([1e-3, 2e-3, 3e-3, 4e-3], [MIB] * 4), curve.at)
    assert MgWfbp().cut(problem) == (1, 2, 3, 4)


# --- fixed sizes ------------------------------------------------------------------------------------------------------


def buckets_of_torch(sizes: list[int], caps: list[int]) -> Ends:
    """Where DDP's own function cuts gradients of so many bytes."""
    tensors = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    buckets, _ = _compute_bucket_assignment_by_size(tensors, caps, [False] * len(sizes))
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    return tuple(bucket[-1] + 1 for bucket in buckets)


@pytest.mark.parametrize("seed", range(20))
def test_caps_cut_where_ddp_cuts_and_ddp_rebuilds_any_plan_from_its_caps(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((1, 100, MIB // 2, MIB, 3 * MIB, 25 * MIB)) for _ in range(rng.randrange(1, 16))]
    problem = Problem(trace_of([0.0] * len(sizes), sizes), affine(1.0, 0.0))
    for name, caps in (("ddp", [MIB, 25 * MIB]), ("layerwise", [1]), ("single", [2**40])):
        assert build(Schedule, name).cut(problem) == buckets_of_torch(sizes, caps)
    problem = draw(seed, 15, sparse=True)
    plan = SparseExact().plan(problem)
    caps = [int(cap * MIB) for cap in plan.bucket_caps_mb]
    ends = buckets_of_torch([layer.num_bytes for layer in problem.trace.layers], caps)
    assert [problem.num_bytes(*group) for group in groups_of(ends)] == list(plan.num_bytes)


# --- plans and rounds -------------------------------------------------------------------------------------------------


def test_a_plan_names_what_it_groups_and_is_of_one_model() -> None:
    plan = Plan(schedule="exact", groups=(("b", "a"), ("c",)), num_bytes=(12, 4), step_s=1.0)
    assert plan.digest == replace(plan, step_s=2.0).digest
    assert plan.digest != replace(plan, groups=(("b",), ("a", "c"))).digest
    model = {"a": 4, "b": 8, "c": 4}
    plan.check_model(model)
    for other, name in (({"a": 4, "b": 8}, "'c'"), (model | {"d": 4}, "'d'"), (model | {"b": 9}, "12 bytes")):
        refused(lambda other=other: plan.check_model(other), name)


@pytest.mark.parametrize("num_messages", [1, 2, 3])
def test_groups_that_share_rounds_pay_for_latency_once_a_round_and_for_every_transfer(num_messages: int) -> None:
    """Of groups that are all ready at once, B + c - 1 rounds; of one group, its messages one after the other."""
    latency, per_byte = 1.0, 0.01

    def messages(num_bytes: float) -> tuple[tuple[float, float], ...]:
        return ((latency, per_byte * num_bytes),) * num_messages

    trace = trace_of([0.0] * 5, [10, 20, 30, 40, 50])
    problem = Problem(trace, lambda num_bytes: sum(map(sum, messages(num_bytes))), messages=messages)
    for ends in groupings(5):
        step, transfer_s = timeline(problem, ends), num_messages * per_byte * 150
        done = [sent.done_s for sent in step.transfers]
        assert step.end_s == pytest.approx((len(ends) + num_messages - 1) * latency + transfer_s)
        assert done == sorted(done)
        assert done[-1] == pytest.approx(step.end_s)
    assert timeline(problem, (5,)) == timeline(replace(problem, messages=None), (5,))
