"""Check the settings of a simulation, and compute a frame of rows for each question."""

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pandas as pd

from experiments.config.errors import UserError, as_user_error
from experiments.planning.costs import Flat
from experiments.planning.nodes import NodeNetwork, level_bytes
from experiments.planning.problem import group_volume
from experiments.planning.schedules.base import Schedule
from experiments.planning.traces import Trace
from experiments.tools.shared.methods import select_names
from experiments.tools.shared.options import to_positive
from experiments.tools.simulate import published_gains as gains
from experiments.tools.simulate.method_choices import DENSE, Methods, methods_of
from experiments.tools.simulate.networks import (
    ALGORITHMS,
    MEASURED,
    NetworkChoice,
    load_measured,
    network_choices,
)
from experiments.tools.simulate.steps import (
    EXACT,
    GRAINS,
    Row,
    crossing,
    numbers_of,
    planned,
    rescaled,
    simulate_step,
)
from micro.parts import known

QUESTIONS = ("speedup", "breakdown", "sizes", "timeline", "borders", "headline")
SPARSE_SCHEDULES = [EXACT, "single"]
POWERS = [2**power for power in range(12)]
RATES = (1e8, 1e11)  # bits per second: 100 Mbit/s to 100 Gbit/s
Frames = dict[str, pd.DataFrame]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of a simulation.

    Attributes:
        recorded: the traces as read; ``traces``: rescaled, and by layer or tensor.
        assumed: source of each model's seconds of computation, as a text; ``selection``: source of those of selection.
        networks: each with each algorithm.
        schedules: of each method.
        questions: of QUESTIONS; speed-ups are always written.
    """

    recorded: list[Trace]
    traces: list[Trace]
    assumed: dict[str, str]
    networks: list[NetworkChoice]
    two_level: bool
    methods: Methods
    schedules: dict[str, list[str]]
    workers: tuple[int, ...]
    density: float
    selection: str
    questions: list[str]

    def settings(self) -> Iterator[tuple[Row, Trace, NetworkChoice]]:
        """Yield each model on each network, with the first columns of its rows."""
        for trace, network in itertools.product(self.traces, self.networks):
            facts = {"model": trace.model, "network": network.name, "algorithm": network.algorithm}
            yield facts | {"compute_s": trace.compute_s}, trace, network


def setup_of(options: argparse.Namespace) -> Setup:
    """Return the setup from the options of ``python -m experiments.simulate``, and read its files.

    Raises:
        UserError: an unusable file, an unknown name, or a number out of range.
    """
    workers = tuple(sorted(set(options.workers or POWERS)))
    networks = _networks(options, workers)
    if options.two_level and options.select:
        raise UserError("--select holds no times of two levels: leave out --select or --two-level")
    speed = {"table": options.select, "memory_gb_s": options.memory_gb_s}
    methods, selection = methods_of(options.methods, options.density, **speed)
    recorded = [load_measured(Trace, path) for path in options.trace]
    if len({trace.model for trace in recorded}) < len(recorded):
        models = ", ".join(trace.model for trace in recorded)
        raise UserError(f"--trace must be of different models, got {models}")
    for network, trace, method in itertools.product(networks, recorded, methods.reducers):
        with as_user_error(before=f"{method} on {network.name}: "):  # before anything is computed
            problem = methods.problem(trace, network.of(max(network.workers)), method)
            part = trace.num_bytes // 2  # the shapes in a part are unknown
            _ = problem.exchange(part), problem.select(part)
    timed = [_computing(trace, options.compute_s) for trace in recorded]
    schedules = {DENSE: select_names(options.schedules, list(known(Schedule)), "schedules")}
    return Setup(
        recorded=recorded,
        traces=[GRAINS[options.grain](trace) for trace, _ in timed],
        assumed={trace.model: words for trace, words in timed},
        networks=networks,
        two_level=options.two_level,
        methods=methods,
        schedules=schedules | dict.fromkeys(methods.sparse, SPARSE_SCHEDULES),
        workers=workers,
        density=options.density,
        selection=selection,
        questions=select_names(options.only, QUESTIONS, "--only"),
    )


def _networks(options: argparse.Namespace, workers: tuple[int, ...]) -> list[NetworkChoice]:
    given = select_names(options.algorithm, ALGORITHMS, "algorithm") if options.algorithm else []
    algorithms: list[str | None] = [name for name in ALGORITHMS if name in given] or [None]  # None: each network's own
    of_nodes = {"intra": options.intra, "ranks_per_node": options.ranks_per_node}
    choices = (
        network_choices(n, algorithms, workers, two_level=options.two_level, **of_nodes) for n in options.network
    )
    networks = list(itertools.chain.from_iterable(choices))
    names = [f"{network.name} ({network.algorithm})" for network in networks]
    if len(set(names)) < len(names):
        raise UserError(f"--network must be of different names, got {', '.join(names)}: rename one, in a yaml by name")
    if tables := [network for network in networks if network.algorithm == MEASURED]:
        if given and len(tables) == len(networks):
            raise UserError(
                f"--algorithm {','.join(given)} is for models of networks, not for a measured table: leave it out"
            )
        for name, own in ((each.name, each.workers[0]) for each in tables):
            if options.workers and own not in workers:
                raise UserError(
                    f"--workers must have {own}, which {name} was measured with, got {', '.join(map(str, workers))}"
                )
    if not any(network.nodes for network in networks):
        for option in (key for key, value in of_nodes.items() if value is not None):
            uses = "--algorithm hierarchical, --two-level, or a network of nodes"
            raise UserError(f"--{option.replace('_', '-')} is for {uses}: add one, or leave it out")
    return networks


def _computing(trace: Trace, given: str) -> tuple[Trace, str]:
    """Return a trace with the requested seconds of computation, and a text with their source."""
    if given == "trace" or (given == "published" and trace.model not in gains.PUBLISHED):
        return trace, f"as measured on {trace.device}"
    if given == "published":
        found = gains.nearest(list(gains.headline(trace, gains.READINGS[:1])), gains.PUBLISHED[trace.model])
        return rescaled(trace, found["compute_s"]), "fitted to MG-WFBP's published gains"
    try:
        return rescaled(trace, to_positive(given)), "assumed"
    except argparse.ArgumentTypeError:
        raise UserError(f"--compute-s must be a number above 0, 'trace' or 'published', got '{given}'") from None


def compute(setup: Setup) -> Frames:
    """Return a frame of rows for each question that has rows."""
    asked = [name for name in ANSWERS if name not in QUESTIONS or name in setup.questions]
    frames = {name: pd.DataFrame(list(ANSWERS[name](setup))) for name in asked}
    return {name: frame for name, frame in frames.items() if not frame.empty}


def _steps(setup: Setup) -> Iterator[Row]:
    """Yield a row per number of workers, method and schedule."""
    for facts, trace, network in setup.settings():
        for workers, (method, schedules) in itertools.product(network.workers, setup.schedules.items()):
            problem = setup.methods.problem(trace, network.of(workers), method)
            for schedule in schedules:
                named = {"workers": workers, "method": method, "schedule": schedule}
                yield facts | named | simulate_step(problem, schedule, workers)


def _timeline(setup: Setup) -> Iterator[Row]:
    """Yield start and end of each layer's backward and each group's message, for each dense schedule.

    In seconds, for the number of workers of the published gains, or the nearest simulated one. ``group`` counts
    messages.
    """
    for facts, trace, network in setup.settings():
        workers = min(network.workers, key=lambda count: abs(count - gains.PUBLISHED_WORKERS))
        problem = setup.methods.problem(trace, network.of(workers), DENSE)
        for schedule in setup.schedules[DENSE]:
            _, step = planned(problem, schedule)
            layers = list(pairwise((0.0, *problem.ready_s)))
            named = facts | {"workers": workers, "schedule": schedule}
            for group, sent in enumerate(step.transfers):
                spans = [("backward", *layer) for layer in layers[sent.start : sent.stop]]
                for what, begin, end in [*spans, ("exchange", sent.sent_s, sent.done_s)]:
                    yield named | {"group": group, "what": what, "begin_s": begin, "end_s": end}


def _levels(setup: Setup) -> Iterator[Row]:
    """Yield each method with one level, among all workers, and with two: dense within nodes, the method between them.

    ``within_bytes`` and ``between_bytes``: mean bytes per worker and step, within its node and to other nodes.
    """
    methods = setup.methods
    for facts, trace, network in setup.settings() if setup.two_level else ():
        for workers, method in itertools.product(network.workers, methods.reducers):
            costs = network.of(workers)
            assert isinstance(costs, NodeNetwork), "without nodes there is one level"
            local, size = costs.ranks_per_node, trace.element_bytes
            of_levels = {
                "one": (methods.reducers[method], methods.problem(trace, costs, method)),
                "two": (methods.two_level(method, local), methods.two_level_problem(trace, costs, method)),
            }
            for levels, (reducer, problem) in of_levels.items():
                ends, step = planned(problem, EXACT)
                numels = [round(problem.num_bytes(*group) / size) for group in pairwise((0, *ends))]
                sent = [level_bytes(group_volume(reducer, n, workers, size), costs) for n in numels]
                within, between = (sum(part) for part in zip(*sent, strict=True))
                named = {"workers": workers, "ranks_per_node": local, "method": method, "levels": levels}
                numbers = numbers_of(problem, ends, step, workers)
                yield facts | named | numbers | {"within_bytes": within, "between_bytes": between}


def _borders(setup: Setup) -> Iterator[Row]:
    """Yield for each method and number of workers the rate below which its step is shorter than dense.

    Both with exact plans, on a ring with the latency of the paper's cluster. The border is 0 if the method never gains,
    infinite if it still gains at the highest of RATES.
    """

    @cache
    def step_s(trace: Trace, workers: int, method: str, rate: float) -> float:
        network = Flat(replace(gains.cluster_link(), beta_s=8 / rate), workers)
        return float(simulate_step(setup.methods.problem(trace, network, method), EXACT, workers)["step_s"])

    sizes = [count for count in setup.workers if count > 1]
    for trace, workers, method in itertools.product(setup.traces, sizes, setup.methods.sparse):

        def gain(rate: float, of: tuple[Trace, int] = (trace, workers), method: str = method) -> float:
            return step_s(*of, DENSE, rate) / step_s(*of, method, rate)

        yield {"model": trace.model, "workers": workers, "method": method, "border": crossing(gain, *RATES)}


def _headline(setup: Setup) -> Iterator[Row]:
    """Yield the gains of merged gradients, ours and published."""
    for trace in setup.recorded:
        if published := gains.PUBLISHED.get(trace.model):
            facts = {f"published_{name.removeprefix('over_')}": gain for name, gain in published._asdict().items()}
            yield from ({"model": trace.model} | facts | row for row in gains.headline(trace))


ANSWERS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "steps": _steps,
    "timeline": _timeline,
    "levels": _levels,
    "borders": _borders,
    "headline": _headline,
}
