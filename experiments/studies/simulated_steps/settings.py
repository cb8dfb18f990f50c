"""The settings of a simulation, read and checked before anything is computed."""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.config.errors import UserError
from experiments.studies.methods import select_names
from experiments.studies.simulated_steps.method_choices import DENSE, Methods, methods_of
from experiments.studies.simulated_steps.networks import (
    ALGORITHMS,
    NetworkChoice,
    NodeOptions,
    load_measured,
    network_choices,
)
from experiments.studies.simulated_steps.published_gains import COMPUTES, PUBLISHED, READINGS, headline, nearest
from experiments.studies.simulated_steps.step import EXACT, Way
from experiments.studies.simulated_steps.trace_changes import GRAINS, rescaled
from micro.parts import known
from micro.planning.schedules.base import Schedule
from micro.planning.traces import Trace

TRACES = tuple(Path(f"results/published/traces/{name}.json") for name in ("googlenet", "resnet50", "resnet18"))
NETWORKS = "k80_10gbe"
WORKERS = "1,2,4,8,16,32,64,128,256,512,1024,2048"
SCHEDULES = f"layerwise,single,mgwfbp,{EXACT}"
METHODS = f"{DENSE},micro,oktopk,topk"
SPARSE_SCHEDULES = (EXACT, "single")
QUESTIONS = ("speedup", "timeline", "borders", "headline", "trees")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is simulated.

    Attributes:
        recorded: the traces as they were read.
        traces: rescaled, and by layer or tensor, as requested.
        assumed: where the seconds of each model's computation come from, in words.
        networks: each with each algorithm.
        two_level: whether methods are simulated in two levels too.
        methods, ways: dense under each schedule, each sparse method under the exact plan and as one bucket.
        workers, density: as given.
        selection: where the seconds of selection come from, in words.
        questions: of QUESTIONS; the speed-ups are among what is written in any case.
    """

    recorded: tuple[Trace, ...]
    traces: tuple[Trace, ...]
    assumed: dict[str, str]
    networks: tuple[NetworkChoice, ...]
    two_level: bool
    methods: Methods
    ways: tuple[Way, ...]
    workers: tuple[int, ...]
    density: float
    selection: str
    questions: tuple[str, ...]


def study_of(options: argparse.Namespace) -> Study:
    """Return the study that the options of ``python -m experiments.simulate`` describe, its files read.

    Raises:
        UserError: a file that cannot be used, a name that does not exist, a number out of its range.
    """
    workers = tuple(sorted(set(options.workers)))
    algorithms = _algorithms(options.algorithm)
    nodes = NodeOptions(intra=options.intra, ranks_per_node=options.ranks_per_node, two_level=options.two_level)
    networks = [each for name in options.network for each in network_choices(name, algorithms, nodes, workers)]
    _check_nodes(nodes, networks)
    if options.two_level and options.select:
        raise UserError("--select holds no times of two levels: leave out --select or --two-level")
    methods, selection = methods_of(
        options.methods, options.density, table=options.select, memory_gb_s=options.memory_gb_s
    )
    schedules = select_names(options.schedules, list(known(Schedule)), "schedules")
    ways = [Way(DENSE, name) for name in schedules]
    ways += [Way(method, schedule) for method in methods.sparse for schedule in SPARSE_SCHEDULES]
    recorded = [load_measured(Trace, path) for path in options.trace]
    models = [trace.model for trace in recorded]
    if len(set(models)) < len(models):
        raise UserError(f"--trace must be of different models, got {', '.join(models)}")
    for network, trace in itertools.product(networks, recorded):
        _check_costs(trace, network, methods)
    timed = [_computing(trace, options.compute_s) for trace in recorded]
    return Study(
        recorded=tuple(recorded),
        traces=tuple(GRAINS[options.grain](trace) for trace, _ in timed),
        assumed={trace.model: words for trace, words in timed},
        networks=tuple(networks),
        two_level=options.two_level,
        methods=methods,
        ways=tuple(ways),
        workers=workers,
        density=options.density,
        selection=selection,
        questions=tuple(select_names(options.only, QUESTIONS, "--only")),
    )


def _algorithms(given: Sequence[str]) -> list[str | None]:
    """Return the algorithms given; None stands for each network's own."""
    words = select_names(given, ALGORITHMS, "algorithm") if given else []
    return [name for name in ALGORITHMS if name in words] or [None]


def _check_nodes(options: NodeOptions, networks: Sequence[NetworkChoice]) -> None:
    """Refuse options of nodes where no network has any."""
    given = {"--ranks-per-node": options.ranks_per_node, "--intra": options.intra}
    for option, value in given.items():
        if value is not None and not any(network.nodes for network in networks):
            raise UserError(
                f"{option} is for --algorithm hierarchical, --two-level, or a network of nodes: add one, or leave "
                f"{option} out"
            )


def _check_costs(trace: Trace, network: NetworkChoice, methods: Methods) -> None:
    """Compute the costs of each method once, so that an unknown cost is an error before anything else is computed."""
    world_size = max(network.workers)
    for method in methods.reducers:
        try:
            problem = methods.problem(trace, network.of(world_size), method, world_size)
            _ = problem.exchange(trace.num_bytes), problem.select(trace.num_bytes), problem.gather(trace.num_bytes)
        except ValueError as error:
            raise UserError(f"{method} on {network.name}: {error}") from None


def _computing(trace: Trace, given: str) -> tuple[Trace, str]:
    """Return a trace with the requested seconds of computation, and in words where they come from."""
    measured = f"as measured on {trace.device}"
    if given == "trace" or (given == "published" and trace.model not in PUBLISHED):
        return trace, measured
    if given == "published":
        rows = list(headline(trace, COMPUTES, READINGS[:1]))
        compute_s = float(nearest(rows, PUBLISHED[trace.model])["compute_s"])
        return rescaled(trace, compute_s), "chosen: nearest to the published gains"
    try:
        compute_s = float(given)
    except ValueError:
        compute_s = math.nan
    if not 0 < compute_s < math.inf:
        raise UserError(f"--compute-s must be a number above 0, 'trace' or 'published', got '{given}'")
    return rescaled(trace, compute_s), "as given"
