"""The methods of a simulation, and their seconds of selection: measured, or by a formula."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import micro
from experiments.config.errors import UserError
from experiments.studies.methods import build_methods, known_methods, select_names
from experiments.studies.simulated_steps.networks import load_measured
from experiments.training.schedule_problem import Selection, problem_of
from micro.planning.costs import Network
from micro.planning.nodes import NodeNetwork
from micro.planning.schedules.base import Problem
from micro.planning.tables import SelectTable
from micro.planning.traces import Trace

DENSE = "dense"
MEMORY_GB_S = 240.0  # assumed: neither measured nor published
SORTED, SLICED = ("topk", "leader"), ("micro", "exdyna")  # a leader sorts while all others wait for it
SCANNED = ("reused", "threshold", "gaussiank", "dgc", "redsync", "sidco", "sage")
SORT_S = 2.18896957e-10  # s of s x log2(x) for the top-k of a P102-100, literal in the public code of OMGS-SGD
MATRICES = "powersgd"
# Of a matrix method: kept (12) and cleared (4), copied to matrices (8), two products read it (8), one takes from it
# (8), one writes the update (4), which is looked through (4); thin factors, and arithmetic with four columns, are left
# out.
MATRIX_BYTES = 48
SHARE_BYTES = 20  # copied into shards (8), the parts received added up (4), the updates put in place (8)
SCAN_BYTES, KEEP_BYTES = 4, 16  # read once to compare; residual + gradient, kept (12), and the gradient cleared (4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionFormula:
    """Seconds of selection: memory traffic, and for an exact top-k the known s x log2(x).

    Every method adds the residual and clears the gradient, 16 bytes an element; one with a threshold reads all of it
    once more, 4 bytes, one with exclusive slices reads a share of 1 in ``world_size``. PowerSGD's products of matrices
    with a few columns pass through memory too. Starting a kernel costs nothing. In two levels a method selects from a
    shard, and 20 bytes an element take shards apart and together.

    Attributes:
        selectors: the name of each method's selector; dense, which is not among them, selects nothing.
        world_size: of the ranks that select: those of one place in all nodes, in two levels.
        bytes_per_s: of memory, assumed.
        ranks_per_node: number of shards; None: one level.
    """

    selectors: dict[str, str]
    world_size: int
    bytes_per_s: float
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        known = (*SORTED, *SLICED, *SCANNED, MATRICES)
        for method, selector in self.selectors.items():
            if selector not in known:
                raise UserError(
                    f"no formula for the selection of {method} ({selector}), only for {', '.join(known)}: measure it "
                    "with 'python -m experiments.profile select' and give --select FILE"
                )

    def seconds(self, method: str, numel: float) -> float:
        """Return the seconds that a method takes for ``numel`` elements."""
        if self.ranks_per_node is None:
            return self._of_one_level(method, numel)
        return SHARE_BYTES * numel / self.bytes_per_s + self._of_one_level(method, numel / self.ranks_per_node)

    def _of_one_level(self, method: str, numel: float) -> float:
        selector = self.selectors.get(method)
        if selector is None:
            return 0.0
        if selector == MATRICES:
            return MATRIX_BYTES * numel / self.bytes_per_s
        kept_s = KEEP_BYTES * numel / self.bytes_per_s
        if selector in SORTED:
            return kept_s + SORT_S * numel * math.log2(max(numel, 2))
        share = self.world_size if selector in SLICED else 1
        return kept_s + SCAN_BYTES * numel / share / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """The methods that are compared, and what each computes before it sends.

    Attributes:
        reducers: by name of conf/sparsifier; dense is among them.
        selection: seconds of selection, for a number of workers and, in two levels, the ranks of a node.
    """

    reducers: Mapping[str, micro.Reducer]
    selection: Callable[[int, int | None], Selection]

    @property
    def sparse(self) -> list[str]:
        """The methods that are not the baseline."""
        return [name for name in self.reducers if name != DENSE]

    def problem(self, trace: Trace, network: Network, method: str, world_size: int) -> Problem:
        """Return the problem that a schedule solves for a method on ``world_size`` workers."""
        select = self.selection(world_size, None)
        return problem_of(trace, network, self.reducers[method], world_size, select=select, method=method)

    def two_level(self, method: str, ranks_per_node: int) -> micro.TwoLevel:
        """Return a method between nodes, with a dense mean within them."""
        return micro.TwoLevel(reducer=self.reducers[method], ranks_per_node=ranks_per_node)

    def two_level_problem(self, trace: Trace, network: NodeNetwork, method: str) -> Problem:
        """Return the problem for a method between nodes, with a dense mean within them."""
        select = self.selection(network.num_nodes, network.ranks_per_node)
        reducer = self.two_level(method, network.ranks_per_node)
        return problem_of(trace, network, reducer, network.world_size, select=select, method=method)


def methods_of(given: Sequence[str], density: float, *, table: Path | None, memory_gb_s: float) -> tuple[Methods, str]:
    """Return the methods, dense first, and in words where their seconds of selection come from.

    Args:
        given: names of conf/sparsifier; all where empty.
        table: measured seconds of selection; a formula where there is none.
        memory_gb_s: bandwidth of memory in the formula.

    Raises:
        UserError: an unknown method, or one without seconds of selection.
    """
    names = select_names(given, known_methods(), "methods")
    reducers = build_methods([DENSE, *(name for name in names if name != DENSE)], density)
    sparse = [name for name in reducers if name != DENSE]
    if table is not None:
        measured = _measured(table, sparse)
        words = f"{table}, measured on {measured.device}, {measured.world_size} ranks, density {measured.density:g}"
        return Methods(reducers=reducers, selection=lambda *_: measured), words
    selectors = {}
    for name in sparse:
        reducer = reducers[name]
        selectors[name] = reducer.selector.full_name if isinstance(reducer, micro.SparseReducer) else name

    def formula(world_size: int, ranks_per_node: int | None) -> SelectionFormula:
        speed = {"bytes_per_s": 1e9 * memory_gb_s, "ranks_per_node": ranks_per_node}
        return SelectionFormula(selectors=selectors, world_size=world_size, **speed)  # type: ignore[arg-type]

    formula(1, None)  # a method without a formula is refused here
    origin = "an assumption, neither measured nor published" if memory_gb_s == MEMORY_GB_S else "as given"
    words = f"a formula, with memory of {memory_gb_s:g} GB/s, {origin}"
    return Methods(reducers=reducers, selection=formula), words


def _measured(path: Path, sparse: Sequence[str]) -> SelectTable:
    table = load_measured(SelectTable, path)
    of = {name: name.split("+")[0] for name in sparse}  # a method with another feedback selects as its yaml does
    missing = [name for name in of.values() if name not in table.methods]
    if missing:
        held = ", ".join(table.methods)
        raise UserError(f"{path} holds {held}, not {missing[0]}: measure it, or leave it out of --methods")
    return replace(table, methods={name: table.methods[measured] for name, measured in of.items()})
