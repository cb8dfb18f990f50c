"""The laws of the project's own methods, for anyone's: ``check_laws`` proves a reducer and its parts in a simulation.

    reducer = micro.SparseReducer(MySelector(), density=0.05)
    check_laws(reducer, Promises(band=EXACT))

It needs no pytest: a law that does not hold raises AssertionError, which names the law, the ranks and the step.
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
LONG, SETTLED = Layout.flat(4000), 6  # a vector long enough for densities, and the steps after which methods settle
BAD_RANK, BAD_INDEX, BAD_NAME = 1, 130, "a.bias"


@dataclass(frozen=True, slots=True)
class Band:
    """Where the number of updated elements lies, given k: at least ``lowest * k``, at most ``highest(world_size) * k``.

    The lower end holds where k elements are not zero. ``at_once`` says that it holds in every step, after jumps of
    scale and with ties too.
    """

    lowest: float
    highest: Callable[[int], float]
    at_once: bool = True


EXACT = Band(1.0, lambda _world_size: 1.0)
BUILD_UP = Band(1.0, lambda world_size: world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What a method promises beyond what holds for all.

    Attributes:
        band: where the density ends up; None where it is not controlled.
        conserves_mass: what is not sent is kept, whatever the gradients: not so for means over senders, and for
            public code that loses some.
        traffic_within: a settled step's requests have the bytes that the parts state (``volume``), give or take this
            share and 4 bytes; None where parts do not state any.
        names_rank: an error about NaN names the rank.
        mixes: an element of the update is made of many, so that rounding is relative to the norm of the vector.
        dense: parameters of which nothing is kept, because they are reduced densely.
        ranks_per_node: gradients are averaged over so many ranks first, so that mass is conserved over nodes.
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
    """A method on so many ranks."""

    reducer: Reducer
    promises: Promises
    world_size: int
    dtype: torch.dtype = torch.float64

    def simulation(self, layout: Layout = LAYOUT, *, shares: bool = False, nonfinite: str = "stop") -> Simulation:
        """Return a simulation whose parts are checked in what they return."""
        reducer = replace(checked(self.reducer), nonfinite=nonfinite)  # type: ignore[type-var]
        return Simulation(reducer, layout, self.world_size, dtype=self.dtype, shares=shares)

    def gradients(self, step: int, layout: Layout = LAYOUT) -> Tensor:
        """Return (world_size, numel) normal gradients: a part that all ranks share, and noise of their own."""
        randomness = torch.Generator().manual_seed(1000 * step + self.world_size)
        shared = torch.randn(1, layout.numel, generator=randomness, dtype=torch.float64)
        own = torch.randn(self.world_size, layout.numel, generator=randomness, dtype=torch.float64)
        drawn = shared + own
        for name, place in layout.slices():
            drawn[:, place] *= SCALES.get(name, 1.0)
        return drawn.to(self.dtype)

    def run(self, num_steps: int = 5, layout: Layout = LAYOUT, *, shares: bool = False) -> "list[Taken]":
        """Return the steps of an ordinary run."""
        simulation = self.simulation(layout, shares=shares)
        return [take(simulation, self.gradients(step, layout)) for step in range(num_steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One step: what went in, what came out, and the residuals around it; rows are ranks.

    Attributes:
        waiting: what is left of the residual, and what the feedback's momentum adds to it.
        momentum: the part of ``waiting`` that is not the residual, where there is one.
    """

    grads: Tensor
    waiting: Tensor
    updates: Tensor
    after: Tensor
    stats: list[StepStats]
    momentum: Tensor | None = None


def take(simulation: Simulation, grads: Tensor) -> Taken:
    """Return one step of ``grads`` (world_size, numel)."""
    feedback, momentum = getattr(innermost(simulation.reducer), "feedback", None), None
    waiting = getattr(feedback, "decay", 1.0) * torch.stack(simulation.residuals())
    if factor := getattr(feedback, "momentum", 0.0):
        momentum = factor * torch.stack(simulation.memory("momentum"))
        waiting, momentum = waiting + momentum, momentum if momentum.numel() else None
    updates = grads.clone()
    stats = simulation.step_(updates)
    after = torch.stack(simulation.residuals())
    return Taken(grads=grads, waiting=waiting, updates=updates, after=after, stats=stats, momentum=momentum)


def assert_step(promises: Promises, step: Taken) -> None:
    """All ranks hold the same bits, which are finite, and mass is conserved where that is promised."""
    for rank, update in enumerate(step.updates):
        assert torch.equal(step.updates[0], update), f"rank {rank} holds another update than rank 0"
    assert torch.isfinite(step.updates).all(), "the update is not finite"
    if promises.conserves_mass:
        _assert_conserved(promises, step)


def _assert_conserved(promises: Promises, step: Taken) -> None:
    """sum(acc over ranks) == sum(residual) + world_size * update, at every element, but for the rounding of sums.

    Where gradients are averaged within nodes first, nodes stand for ranks. Rounding is that of the residual, which
    keeps what a half-precision mean rounds off too, and of the gradient where nothing is kept.
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
    """Between the lowest and the highest number of elements are updated."""
    k, count = stats.target_count, stats.global_count
    lowest, highest = band.lowest * k, band.highest(world_size) * k
    assert lowest <= count <= highest, f"{count} elements are updated, not {lowest:.6g} to {highest:.6g}"


# --- the laws ---------------------------------------------------------------------------------------------------------


def ordinary_steps(case: Case) -> None:
    """Replicas are bitwise equal, mass is conserved element by element, and ranks may share what is alike."""
    for step, shared in zip(case.run(), case.run(shares=True), strict=True):
        assert_step(case.promises, step)
        assert len({(s.counts, s.global_count, s.target_count) for s in step.stats}) == 1, "ranks count differently"
        assert torch.equal(step.updates, shared.updates), "simulated ranks that share memory update otherwise"
        assert torch.equal(step.after, shared.after), "simulated ranks that share memory keep something else"


def traffic(case: Case) -> None:
    """As many elements are updated as promised, by the requests that the parts state, of the bytes that they state."""
    case = replace(case, dtype=torch.float32)
    band, within, n = case.promises.band, case.promises.traffic_within, case.world_size
    steps = case.run(2 * SETTLED, LONG)
    for step in steps:
        if band is not None:
            assert_in_band(band, step.stats[0], n)
        assert n > 1 or not step.stats[0].num_collectives, "one rank alone sends something"
    if n == 1 or within is None:
        return
    stats = min((step.stats for step in steps[SETTLED:]), key=lambda ranks: ranks[0].num_collectives)
    counts = {"local_count": fmean(stats[0].counts), "longest_count": max(stats[0].counts)}
    said = calls_of(case.reducer, LONG.numel, n, build_up=stats[0].build_up, layout=LONG, **counts)
    made = [(calls[0][0], [size for _, size in calls]) for calls in zip(*(s.calls for s in stats), strict=True)]
    assert [op for op, _ in made] == [op for op, _ in said], f"requests are {made}, stated are {said}"
    for (op, sizes), (_, expected) in zip(made, said, strict=True):
        # in a tree some ranks send nothing: the size is that of one that does
        away = min(abs(size - expected) for size in (fmean(sizes), max(sizes)))
        assert away <= within * expected + 4, f"{op} has {fmean(sizes):.6g} bytes, stated are {expected:.6g}"


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
    """Zeros, ties, tiny and large gradients have a defined outcome, and ordinary ones after them too."""
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
        for step in case.run(case.world_size + 2, Layout.flat(numel)):  # every rank has every slice once, some twice
            assert_step(case.promises, step)


def nonfinite_gradients(case: Case) -> None:
    """NaN and Inf stop the step on all ranks or are left out, and what is finite waits, bit for bit."""
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
        assert not step.updates.any(), "a step that is left out has an update"
        assert all(stats.skipped and not stats.global_count for stats in step.stats), "it is not counted as skipped"
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
    raise AssertionError("a gradient that is not finite is no error")


def _assert_waits(promises: Promises, step: Taken) -> None:
    """Nothing was sent: all that is finite is kept, bit for bit unless a momentum was added in another order."""
    per_node = promises.ranks_per_node
    means = _over_nodes(step.grads, per_node) / per_node
    kept = torch.where(torch.isfinite(means), means, 0)
    for name in promises.dense:
        kept[:, PLACES[name]] = 0
    allowed = 0.0 if step.momentum is None else 100 * torch.finfo(step.after.dtype).eps
    expected = _over_nodes(step.waiting, per_node) + kept
    torch.testing.assert_close(_over_nodes(step.after, per_node), expected, rtol=allowed, atol=allowed)


def save_and_restore(case: Case) -> None:
    """A run that is saved and restored in its middle is the uninterrupted one, bit for bit, in its statistics too."""
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
    """Residuals follow their parameters into a bucket of another order."""
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
    """Half-precision gradients lose nothing that single precision holds."""
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
    """Raise AssertionError unless a reducer obeys all laws on so many simulated ranks, and so do its parts.

    What selectors and exchanges return is checked at every step: int32 indices, ascending or at least unique, in
    range, counts that are true, and an accumulator that is left as it was.

    Args:
        reducer: any, for instance `SparseReducer` with a part of your own.
        promises: what it promises beyond what holds for all; by default that mass is conserved, and traffic stated.
        world_sizes: numbers of ranks. One, and one that is no power of two, should be among them.
    """
    for law in LAWS:
        for world_size in world_sizes:
            try:
                law(Case(reducer=reducer, promises=promises or Promises(), world_size=world_size))
            except AssertionError as error:
                raise AssertionError(f"{law.__name__.replace('_', ' ')}, {world_size} ranks: {error}") from error
