"""What a simulation was asked for, read and checked before anything is computed."""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, get_args

from experiments.config.errors import UserError
from experiments.studies import simulated_steps as simulating
from experiments.studies.methods import build_methods, known_methods, select_names
from experiments.studies.networks import Nodes, Preset, load_network
from experiments.studies.simulated_steps import DENSE, EXACT, PUBLISHED, Formula, Methods, Way
from experiments.training.schedule_problem import Selection
from micro import SparseReducer
from micro.parts import known
from micro.planning.costs import Algorithm, Network, best_of
from micro.planning.schedules.base import Schedule
from micro.planning.traces import BadFile, LinkTable, SelectTable, Trace

TRACES = tuple(Path(f"results/published/traces/{name}.json") for name in ("googlenet", "resnet50", "resnet18"))
NETWORK = "k80_10gbe"
INTRA, RANKS_PER_NODE = "v100_pcie", 8
MEMORY_GB_S = 240.0  # assumed: neither measured nor published
WORKERS = "1,2,4,8,16,32,64,128,256,512,1024,2048"
SCHEDULES = f"layerwise,single,mgwfbp,{EXACT}"
METHODS = f"{DENSE},micro,oktopk,topk"
SPARSE_SCHEDULES = (EXACT, "single")
COMPUTES = simulating.spread(0.03, 10.0, per_decade=16)  # seconds of a step that are assumed in turn
Asked: TypeAlias = Algorithm | Literal["hierarchical", "best"]
ALGORITHMS: tuple[Asked, ...] = (*get_args(Algorithm), "hierarchical", "best")
File = TypeVar("File", Trace, LinkTable, SelectTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """A network, and how it reduces.

    Attributes:
        name, algorithm: for titles.
        workers: numbers of workers that it is for.
        of: its costs for one of them.
    """

    name: str
    algorithm: str
    workers: Sequence[int]
    of: Callable[[int], Network]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is simulated.

    Attributes:
        recorded: the traces as they were read.
        traces: rescaled, and with layers or tensors, as was asked for.
        assumed: where the seconds of each model's computation come from, in words.
        networks: each with each algorithm.
        nodes: of the hierarchical algorithm.
        methods, ways: dense under each schedule, each sparse method under the exact plan and as one bucket.
        workers, density: as given.
        selection: where the seconds of selection come from, in words.
    """

    recorded: tuple[Trace, ...]
    traces: tuple[Trace, ...]
    assumed: dict[str, str]
    networks: tuple[Wired, ...]
    nodes: Nodes
    methods: Methods
    ways: tuple[Way, ...]
    workers: tuple[int, ...]
    density: float
    selection: str


def study_of(options: argparse.Namespace) -> Study:
    """Return what the words of a command line ask for.

    Raises:
        UserError: a file that cannot be used, a name that does not exist, a number out of its range.
    """
    workers = _whole_numbers("--workers", options.workers)
    algorithms = _algorithms(options.algorithm)
    nodes = _nodes(options, algorithms)
    networks = [wired for name in options.network for wired in _wired(name, algorithms, nodes, workers)]
    methods, selection = _methods(options)
    schedules = select_names(_words(options.schedules), list(known(Schedule)), "schedules")
    ways = [Way(DENSE, name) for name in schedules]
    ways += [Way(method, schedule) for method in methods.sparse for schedule in SPARSE_SCHEDULES]
    recorded = [_load(Trace, path) for path in options.trace]
    models = [trace.model for trace in recorded]
    if len(set(models)) < len(models):
        raise UserError(f"--trace must be of different models, got {', '.join(models)}")
    for network, trace in itertools.product(networks, recorded):
        _check_costs(trace, network, methods)
    timed = [_computing(trace, options.compute_s) for trace in recorded]
    return Study(
        recorded=tuple(recorded),
        traces=tuple(simulating.GRAINS[options.grain](trace) for trace, _ in timed),
        assumed={trace.model: words for trace, words in timed},
        networks=tuple(networks),
        nodes=nodes,
        methods=methods,
        ways=tuple(ways),
        workers=workers,
        density=options.density,
        selection=selection,
    )


def _algorithms(given: str) -> list[Asked | None]:
    """Return what was asked for; None stands for each network's own."""
    words = select_names(_words(given), ALGORITHMS, "algorithm") if given else []
    return [name for name in ALGORITHMS if name in words] or [None]


def _nodes(options: argparse.Namespace, algorithms: Sequence[Asked | None]) -> Nodes:
    given = {"--ranks-per-node": options.ranks_per_node, "--intra": options.intra}
    for option, value in given.items():
        if value is not None and "hierarchical" not in algorithms:
            raise UserError(f"{option} is for --algorithm hierarchical: add that, or leave {option} out")
    ranks_per_node = RANKS_PER_NODE if options.ranks_per_node is None else options.ranks_per_node
    return Nodes(intra=load_network(options.intra or INTRA), ranks_per_node=ranks_per_node)


def _wired(name: str, algorithms: Sequence[Asked | None], nodes: Nodes, workers: tuple[int, ...]) -> list[Wired]:
    if Path(name).suffix == ".json":
        measured = _load(LinkTable, Path(name))
        sizes = (measured.world_size,)
        return [Wired(name=Path(name).stem, algorithm="measured", workers=sizes, of=lambda _: measured)]
    preset = load_network(name)
    wired = [
        Wired(
            name=preset.name,
            algorithm=algorithm or preset.algorithm,
            workers=workers,
            of=partial(_costs, preset, algorithm, nodes),
        )
        for algorithm in algorithms
    ]
    for each, world_size in itertools.product(wired, workers):
        each.of(world_size)  # what is missing is told before anything is computed
    return wired


def _costs(preset: Preset, algorithm: Asked | None, nodes: Nodes, world_size: int) -> Network:
    if algorithm == "hierarchical":
        return nodes.network(preset, world_size)
    if algorithm == "best":
        return best_of(preset.network(world_size, each) for each in get_args(Algorithm))
    return preset.network(world_size, algorithm)


def _methods(options: argparse.Namespace) -> tuple[Methods, str]:
    """Return the methods, dense first, and where their seconds of selection come from, in words."""
    if not options.memory_gb_s > 0:
        raise UserError(f"--memory-gb-s must be above 0, got {options.memory_gb_s:g}")
    names = select_names(_words(options.methods), known_methods(), "methods")
    sparse = [name for name in names if name != DENSE]
    reducers = build_methods([DENSE, *sparse], options.density)
    if options.select is None:
        selectors = {name: _selector(name, reducers[name]) for name in sparse}
        speed = 1e9 * options.memory_gb_s

        def formula(world_size: int) -> Selection:
            return Formula(selectors=selectors, world_size=world_size, bytes_per_s=speed)

        formula(1)  # a method without a formula is refused here
        origin = "an assumption, neither measured nor published" if options.memory_gb_s == MEMORY_GB_S else "as given"
        words = f"a formula, with memory of {options.memory_gb_s:g} GB/s, {origin}"
        return Methods(reducers=reducers, selection=formula), words
    measured = _load(SelectTable, options.select)
    missing = [name for name in sparse if name not in measured.methods]
    if missing:
        held = ", ".join(measured.methods)
        raise UserError(f"{options.select} holds {held}, not {missing[0]}: measure it, or leave it out of --methods")
    words = (
        f"{options.select}, measured on {measured.device}, {measured.world_size} ranks, density {measured.density:g}"
    )
    return Methods(reducers=reducers, selection=lambda _: measured), words


def _check_costs(trace: Trace, network: Wired, methods: Methods) -> None:
    """Ask once for what a step of each method costs: what is not known is told before anything is computed."""
    world_size = max(network.workers)
    for method in methods.reducers:
        try:
            problem = methods.problem(trace, network.of(world_size), method, world_size)
            _ = problem.exchange(trace.num_bytes), problem.select(trace.num_bytes), problem.gather(trace.num_bytes)
        except ValueError as error:
            raise UserError(f"{method} on {network.name}: {error}") from None


def _selector(method: str, reducer: object) -> str:
    return reducer.selector.name if isinstance(reducer, SparseReducer) else method


def _computing(trace: Trace, given: str) -> tuple[Trace, str]:
    """Return a trace with the computation asked for, and where that comes from, in words."""
    measured = f"as measured on {trace.device}"
    if given == "trace" or (given == "published" and trace.model not in PUBLISHED):
        return trace, measured
    if given == "published":
        rows = list(simulating.headline(trace, COMPUTES, simulating.READINGS[:1]))
        compute_s = float(simulating.nearest(rows, PUBLISHED[trace.model])["compute_s"])
        return simulating.rescaled(trace, compute_s), "chosen: nearest to the published gains"
    try:
        compute_s = float(given)
    except ValueError:
        compute_s = math.nan
    if not 0 < compute_s < math.inf:
        raise UserError(f"--compute-s must be a number above 0, 'trace' or 'published', got '{given}'")
    return simulating.rescaled(trace, compute_s), "as given"


def _load(kind: type[File], path: Path) -> File:
    try:
        return kind.load(path)
    except BadFile as error:
        raise UserError(str(error)) from None


def _whole_numbers(option: str, given: str) -> tuple[int, ...]:
    words = _words(given)
    if not words or not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise UserError(f"{option} must be whole numbers of at least 1 with commas between, got '{given}'")
    return tuple(sorted({int(word) for word in words}))


def _words(given: str) -> list[str]:
    return [word for word in given.split(",") if word]
