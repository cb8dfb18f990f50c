"""Test your own reducer or part: ``check_laws`` checks the laws of micro's methods in a simulation.

    reducer = micro.SparseReducer(MySelector(), density=0.05)
    check_laws(reducer, Promises(band=EXACT))

It needs no pytest. A broken law raises AssertionError with the law, the number of ranks and the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from micro.checked_parts import checked
from micro.comm.ranks import Spans
from micro.predicted_traffic import calls_of
from micro.reducers.base import Reducer
from micro.reducers.stats import StepStats
from micro.reducers.wrapping import innermost
from micro.simulate import Simulation
from micro.values.flat import Layout
from micro.values.nonfinite import NonFiniteGradient

LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (8,), (11, 11)))
SCALES = {"a.weight": 1.0, "a.bias": 5.0, "b.weight": 0.2}  # layers differ in scale
PLACES = dict(LAYOUT.slices())
LONG, SETTLED = Layout.flat(4000), 6  # long enough to measure a density; number of steps until methods settle
BAD_RANK, BAD_INDEX, BAD_NAME = 1, 130, "a.bias"


@dataclass(frozen=True, slots=True)
class Band:
    """Bounds on the number of updated elements, given k: ``lowest * k`` to ``highest(world_size) * k``.

    The lower bound holds if at least k elements are not zero. ``at_once``: the band holds in every step, even after
    jumps of scale and with ties.
    """

    lowest: float
    highest: Callable[[int], float]
    at_once: bool = True


EXACT = Band(1.0, lambda _world_size: 1.0)
BUILD_UP = Band(1.0, lambda world_size: world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """Properties of a method beyond the laws of all methods.

    Attributes:
        band: bounds of the density; None if it is not controlled.
        conserves_mass: everything that is not sent is kept. False for means over senders, and for public code that
            loses some.
        traffic_within: relative tolerance, plus 4 bytes, between the bytes of a settled step and the prediction
            (``volume``); None if the parts predict nothing.
        names_rank: an error about NaN names the rank.
        mixes: an element of the update depends on many others, so rounding is relative to the norm of the vector.
        dense: parameters without a residual, because they are reduced densely.
        ranks_per_node: gradients are first averaged over so many ranks; mass is conserved over nodes.
    """

    band: Band | None = None
    conserves_mass: bool = True
    traffic_within: float | None = 0.02
    names_rank: bool = True
    mixes: bool = False
    dense: tuple[str, ...] = ()
    ranks_per_node: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A method on a number of ranks."""

    reducer: Reducer
    promises: Promises
    world_size: int
    dtype: torch.dtype = torch.float64

    def simulation(self, layout: Layout = LAYOUT, *, shares: bool = False, nonfinite: str = "stop") -> Simulation:
        """Return a simulation that checks what the parts return."""
        reducer = replace(checked(self.reducer), nonfinite=nonfinite)  # type: ignore[type-var]
        return Simulation(reducer, layout, self.world_size, dtype=self.dtype, shares=shares)

    def gradients(self, step: int, layout: Layout = LAYOUT) -> Tensor:
        """Return (world_size, numel) normal gradients: a shared part, plus noise of each rank."""
        randomness = torch.Generator().manual_seed(1000 * step + self.world_size)
        shared = torch.randn(1, layout.numel, generator=randomness, dtype=torch.float64)
        own = torch.randn(self.world_size, layout.numel, generator=randomness, dtype=torch.float64)
        drawn = shared + own
        for name, place in layout.slices():
            drawn[:, place] *= SCALES.get(name, 1.0)
        return drawn.to(self.dtype)

    def run(self, num_steps: int = 5, layout: Layout = LAYOUT, *, shares: bool = False) -> "list[StepRecord]":
        """Return the steps of an ordinary run."""
        simulation = self.simulation(layout, shares=shares)
        return [take(simulation, self.gradients(step, layout)) for step in range(num_steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: gradients, update, and the residuals before and after; rows are ranks.

    Attributes:
        waiting: the residual after decay, plus what the feedback's momentum adds to it.
        momentum: the part of ``waiting`` that the momentum adds, if there is one.
    """

    grads: Tensor
    waiting: Tensor
    updates: Tensor
    after: Tensor
    stats: list[StepStats]
    momentum: Tensor | None = None


def take(simulation: Simulation, grads: Tensor) -> StepRecord:
    """Return one step of ``grads`` (world_size, numel)."""
    feedback, momentum = getattr(innermost(simulation.reducer), "feedback", None), None
    waiting = getattr(feedback, "decay", 1.0) * torch.stack(simulation.residuals())
    if factor := getattr(feedback, "momentum", 0.0):
        momentum = factor * torch.stack(simulation.memory("momentum"))
        waiting, momentum = waiting + momentum, momentum if momentum.numel() else None
    updates = grads.clone()
    stats = simulation.step_(updates)
    after = torch.stack(simulation.residuals())
    return StepRecord(grads=grads, waiting=waiting, updates=updates, after=after, stats=stats, momentum=momentum)


def assert_step(promises: Promises, step: StepRecord) -> None:
    """Check that the update is finite and bitwise equal on all ranks, and that mass is conserved if promised."""
    for rank, update in enumerate(step.updates):
        assert torch.equal(step.updates[0], update), f"rank {rank} has another update than rank 0"
    assert torch.isfinite(step.updates).all(), "the update is not finite"
    if promises.conserves_mass:
        _assert_conserved(promises, step)


def _assert_conserved(promises: Promises, step: StepRecord) -> None:
    """Check sum(acc over ranks) == sum(residual) + world_size * update at every element, up to rounding.

    If gradients are first averaged within nodes, nodes take the place of ranks. The tolerance is that of the residual's
    dtype; without a residual, of the gradient's.
    """
    per_node = promises.ranks_per_node
    grads, update = _over_nodes(step.grads.double(), per_node) / per_node, step.updates[0].double()
    waiting, after = (
        _over_nodes(kept.double(), per_node) if kept.numel() else torch.zeros_like(grads)
        for kept in (step.waiting, step.after)
    )
    num_nodes = grads.shape[0]
    lost = (waiting + grads - after).sum(0) - num_nodes * update
    size = (waiting.abs() + grads.abs() + after.abs()).sum(0)  # codes of few bits may send too much
    if step.momentum is not None:  # it may cancel in waiting
        size += _over_nodes(step.momentum.double().abs(), per_node).sum(0)
    if promises.mixes:
        size = size.norm().expand_as(size)
    kept, given = step.after.dtype if step.after.numel() else step.updates.dtype, step.updates.dtype
    rounding = torch.full_like(update, torch.finfo(kept).eps)
    for name in promises.dense:
        if update.numel() == LAYOUT.numel:
            rounding[PLACES[name]] = torch.finfo(given).eps
    allowed = (num_nodes + 4) * rounding * size
    place = int((lost.abs() - allowed).argmax())
    assert lost[place].abs() <= allowed[place], f"element {place} lost {lost[place]:.3g} of {size[place]:.3g}"


def _over_nodes(rows: Tensor, per_node: int) -> Tensor:
    """Return (num_nodes, numel) sums of ``rows`` (world_size, numel) over the ranks of each node."""
    summed: Tensor = rows.unflatten(0, (-1, per_node)).sum(1)
    return summed


def assert_in_band(band: Band, stats: StepStats, world_size: int) -> None:
    """Check that the number of updated elements is in the band."""
    k, count = stats.target_count, stats.global_count
    lowest, highest = band.lowest * k, band.highest(world_size) * k
    assert lowest <= count <= highest, f"{count} elements are updated, expected {lowest:.6g} to {highest:.6g}"


# --- the laws ---------------------------------------------------------------------------------------------------------


def ordinary_steps(case: Case) -> None:
    """Replicas are bitwise equal, mass is conserved at each element, and sharing memory changes nothing."""
    for step, shared in zip(case.run(), case.run(shares=True), strict=True):
        assert_step(case.promises, step)
        assert len({(s.counts, s.global_count, s.target_count) for s in step.stats}) == 1, "ranks count differently"
        assert torch.equal(step.updates, shared.updates), "the update differs if simulated ranks share memory"
        assert torch.equal(step.after, shared.after), "the residual differs if simulated ranks share memory"


def traffic(case: Case) -> None:
    """The number of updated elements is in the band; requests and their bytes match the parts' predictions."""
    case = replace(case, dtype=torch.float32)
    band, within, n = case.promises.band, case.promises.traffic_within, case.world_size
    steps = case.run(2 * SETTLED, LONG)
    for step in steps:
        if band is not None:
            assert_in_band(band, step.stats[0], n)
        assert n > 1 or not step.stats[0].num_collectives, "a single rank sends something"
    if n == 1 or within is None:
        return
    stats = min((step.stats for step in steps[SETTLED:]), key=lambda ranks: ranks[0].num_collectives)
    counts = {"local_count": fmean(stats[0].counts), "longest_count": max(stats[0].counts)}
    said = calls_of(case.reducer, LONG.numel, n, build_up=stats[0].build_up, layout=LONG, **counts)
    made = [(calls[0][0], [size for _, size in calls]) for calls in zip(*(s.calls for s in stats), strict=True)]
    assert [op for op, _ in made] == [op for op, _ in said], f"requests are {made}, predicted are {said}"
    for (op, sizes), (_, expected) in zip(made, said, strict=True):
        # in a tree some ranks send nothing: the size counts for those that send
        away = min(abs(size - expected) for size in (fmean(sizes), max(sizes)))
        assert away <= within * expected + 4, f"{op} has {fmean(sizes):.6g} bytes, predicted are {expected:.6g}"


UNUSUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "tied": torch.ones_like,
    "tied in magnitude": torch.sign,
    "tiny": lambda x: 1e-30 * x,
    "one element": lambda x: torch.nn.functional.one_hot(torch.tensor(7), x.shape[1]).to(x.dtype).expand_as(x),
    "one rank": lambda x: x * (torch.arange(x.shape[0])[:, None] == x.shape[0] - 1),
    "large": lambda x: 1e6 * x,
}


def unusual_gradients(case: Case) -> None:
    """The laws hold with zeros, ties, tiny and large gradients, and in the steps after them."""
    band = case.promises.band
    for kind, change in UNUSUAL.items():
        simulation = case.simulation()
        for number in range(4):
            usual = case.gradients(number)
            step = take(simulation, change(usual) if number < 3 else usual)
            assert_step(case.promises, step)
            if band is not None and band.at_once:
                stats, is_tied = step.stats[0], kind.startswith("tied") and number < 3
                bounded = band if is_tied else replace(band, lowest=0.0)
                assert_in_band(bounded, stats, case.world_size)
            assert kind != "zero" or number == 3 or not step.updates.any(), "zero gradients make an update"


def fewer_elements_than_ranks(case: Case) -> None:
    """Vectors shorter than the number of ranks are reduced."""
    for numel in (1, 2):
        for step in case.run(case.world_size + 2, Layout.flat(numel)):  # every rank gets every slice once, some twice
            assert_step(case.promises, step)


def nonfinite_gradients(case: Case) -> None:
    """NaN and Inf stop or skip the step on all ranks, and all finite elements stay in the residual, bit for bit."""
    first, usual, last = map(case.gradients, range(3))
    bad_rank = BAD_RANK % case.world_size
    for value in (float("nan"), float("-inf")):
        bad = usual.clone()
        bad[bad_rank, BAD_INDEX] = value
        simulation = case.simulation()
        take(simulation, first)
        message = _refused(simulation, bad)
        words = [f"'{BAD_NAME}'", "at step 1", *([f"on rank {bad_rank}"] if case.promises.names_rank else [])]
        missing = [word for word in words if word not in message]
        assert not missing, f"the error does not say {missing}: {message}"
        simulation = case.simulation(nonfinite="skip")
        take(simulation, first)
        step = take(simulation, bad)
        assert not step.updates.any(), "a skipped step has an update"
        assert all(stats.skipped and not stats.global_count for stats in step.stats), (
            "the skipped step is not counted as skipped"
        )
        if step.after.numel():
            _assert_waits(case.promises, step)
        step = take(simulation, last)
        assert_step(case.promises, step)
        assert not step.stats[0].skipped, "the step after it is skipped too"


def _refused(simulation: Simulation, grads: Tensor) -> str:
    try:
        simulation.step(grads)
    except NonFiniteGradient as error:
        return str(error)
    raise AssertionError("a gradient that is not finite raises no error")


def _assert_waits(promises: Promises, step: StepRecord) -> None:
    """Check that nothing was sent and all finite elements are kept, bit for bit unless a momentum was added."""
    per_node = promises.ranks_per_node
    means = _over_nodes(step.grads, per_node) / per_node
    kept = torch.where(torch.isfinite(means), means, 0)
    for name in promises.dense:
        kept[:, PLACES[name]] = 0
    allowed = 0.0 if step.momentum is None else 100 * torch.finfo(step.after.dtype).eps
    expected = _over_nodes(step.waiting, per_node) + kept
    torch.testing.assert_close(_over_nodes(step.after, per_node), expected, rtol=allowed, atol=allowed)


def save_and_restore(case: Case) -> None:
    """A run that is saved and restored equals the uninterrupted one bit for bit, including its statistics."""
    simulation, resumed = case.simulation(), case.simulation()
    for step in range(3):
        take(simulation, case.gradients(step))
    resumed.load_state_dict(simulation.state_dict())
    for number in range(3, 7):
        a, b = (take(each, case.gradients(number)) for each in (simulation, resumed))
        assert torch.equal(a.updates, b.updates), f"update of step {number} differs"
        assert torch.equal(a.after, b.after), f"residual of step {number} differs"
        for x, y in zip(a.stats, b.stats, strict=True):
            assert replace(x, spans=Spans()) == replace(y, spans=Spans()), f"statistics of step {number} differ"


def buckets_change(case: Case) -> None:
    """Residuals follow their parameters when the bucket's order changes."""
    turned, simulation = Layout(LAYOUT.names[::-1], LAYOUT.shapes[::-1]), case.simulation()
    for number in range(2):
        before = take(simulation, case.gradients(number)).after
    simulation.rebuild(turned)
    for old, new in zip(before, simulation.residuals(), strict=True):
        for name, piece in LAYOUT.split(old).items() if old.numel() else ():
            assert torch.equal(turned.split(new)[name], piece), f"the residual of {name} is lost"
    step = take(simulation, case.gradients(2, turned))
    assert_step(replace(case.promises, conserves_mass=False), step)
    assert step.stats[0].step == 2, "the number of the step is lost"


def half_precision(case: Case) -> None:
    """Half-precision gradients are accumulated in single precision, without loss."""
    for step in replace(case, dtype=torch.bfloat16).run(3):
        assert not step.after.numel() or step.after.dtype == torch.float32, "the residual is not of single precision"
        assert_step(case.promises, step)


LAWS: tuple[Callable[[Case], None], ...] = (
    ordinary_steps,
    traffic,
    unusual_gradients,
    fewer_elements_than_ranks,
    nonfinite_gradients,
    save_and_restore,
    buckets_change,
    half_precision,
)


def check_laws(reducer: Reducer, promises: Promises | None = None, *, world_sizes: Sequence[int] = (1, 3, 4)) -> None:
    """Raise AssertionError unless a reducer and its parts obey all laws on simulated ranks.

    At every step the results of selectors and exchanges are checked: int32 indices in range, unique, ascending from a
    selector; correct counts; an unmodified accumulator.

    Args:
        reducer: any, for instance `SparseReducer` with your own part.
        promises: further properties; by default conserved mass and predicted traffic.
        world_sizes: numbers of ranks. Include 1 and one that is not a power of two.
    """
    for law in LAWS:
        for world_size in world_sizes:
            try:
                law(Case(reducer=reducer, promises=promises or Promises(), world_size=world_size))
            except AssertionError as error:
                raise AssertionError(f"{law.__name__.replace('_', ' ')}, {world_size} ranks: {error}") from error
