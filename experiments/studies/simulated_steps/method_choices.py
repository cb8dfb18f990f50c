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
    with a few columns pass through memory too. Starting a kernel costs nothing.

    Attributes:
        selectors: the name of each method's selector.
        bytes_per_s: of memory, assumed.
    """

    selectors: dict[str, str]
    world_size: int
    bytes_per_s: float

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
        if self.selectors[method] == MATRICES:
            return MATRIX_BYTES * numel / self.bytes_per_s
        kept_s = KEEP_BYTES * numel / self.bytes_per_s
        if self.selectors[method] in SORTED:
            return kept_s + SORT_S * numel * math.log2(max(numel, 2))
        share = self.world_size if self.selectors[method] in SLICED else 1
        return kept_s + SCAN_BYTES * numel / share / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelFormula:
    """Seconds of selection in two levels: from a shard, and 20 bytes an element to take shards apart and together.

    Attributes:
        of_shard: of the methods among as many ranks as there are nodes; dense, which it does not know, selects nothing.
        ranks_per_node: number of shards.
    """

    of_shard: SelectionFormula
    ranks_per_node: int

    def seconds(self, method: str, numel: float) -> float:
        """Return the seconds that a method takes for ``numel`` elements."""
        shared_s = SHARE_BYTES * numel / self.of_shard.bytes_per_s
        selects = method in self.of_shard.selectors
        return shared_s + (self.of_shard.seconds(method, numel / self.ranks_per_node) if selects else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """The methods that are compared, and what each computes before it sends.

    Attributes:
        reducers: by name of conf/sparsifier; dense is among them.
        selection: seconds of selection, for a number of workers.
    """

    reducers: Mapping[str, micro.Reducer]
    selection: Callable[[int], Selection]

    @property
    def sparse(self) -> list[str]:
        """The methods that are not the baseline."""
        return [name for name in self.reducers if name != DENSE]

    def problem(self, trace: Trace, network: Network, method: str, world_size: int) -> Problem:
        """Return the problem that a schedule solves for a method on ``world_size`` workers."""
        reducer, select = self.reducers[method], self.selection(world_size)
        return problem_of(trace, network, reducer, world_size, select=select, method=method)

    def two_level(self, method: str, ranks_per_node: int) -> micro.TwoLevel:
        """Return a method between nodes, with a dense mean within them."""
        return micro.TwoLevel(reducer=self.reducers[method], ranks_per_node=ranks_per_node)

    def two_level_problem(self, trace: Trace, network: NodeNetwork, method: str) -> Problem:
        """Return the problem for a method between nodes, with a dense mean within them."""
        local, num_nodes = network.ranks_per_node, network.world_size // network.ranks_per_node
        of_shard = self.selection(num_nodes)
        assert isinstance(of_shard, SelectionFormula), "times of two levels are computed, not measured"
        select = TwoLevelFormula(of_shard=of_shard, ranks_per_node=local)
        reducer = self.two_level(method, local)
        return problem_of(trace, network, reducer, network.world_size, select=select, method=method)


def methods_of(given: Sequence[str], density: float, *, table: Path | None, memory_gb_s: float) -> tuple[Methods, str]:
    """Return the methods, dense first, and in words where their seconds of selection come from.

    Args:
        given: names of conf/sparsifier; all where empty.
        table: measured seconds of selection; a formula where there is none.
        memory_gb_s: bandwidth of memory in the formula.

    Raises:
        UserError: an unknown method, one without seconds of selection, or a number out of its range.
    """
    if not memory_gb_s > 0:
        raise UserError(f"--memory-gb-s must be above 0, got {memory_gb_s:g}")
    names = select_names(given, known_methods(), "methods")
    reducers = build_methods([DENSE, *(name for name in names if name != DENSE)], density)
    if table is not None:
        measured = _measured(table, [name for name in reducers if name != DENSE])
        words = f"{table}, measured on {measured.device}, {measured.world_size} ranks, density {measured.density:g}"
        return Methods(reducers=reducers, selection=lambda _: measured), words
    selectors = {
        name: reducer.selector.full_name if isinstance(reducer, micro.SparseReducer) else name
        for name, reducer in reducers.items()
        if name != DENSE
    }

    def formula(world_size: int) -> SelectionFormula:
        return SelectionFormula(selectors=selectors, world_size=world_size, bytes_per_s=1e9 * memory_gb_s)

    formula(1)  # a method without a formula is refused here
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
