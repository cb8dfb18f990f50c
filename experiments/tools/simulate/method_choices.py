"""The methods of a simulation, with their seconds of computation: measured, or by a formula."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import micro
from experiments.config.errors import UserError
from experiments.planning.costs import Network
from experiments.planning.nodes import NodeNetwork
from experiments.planning.problem import problem_of
from experiments.planning.schedules.base import Problem
from experiments.planning.tables import SelectTable
from experiments.planning.traces import Trace
from experiments.tools.shared.methods import build_methods, known_methods, select_names
from experiments.tools.simulate.networks import load_measured

DENSE = "dense"
MEMORY_GB_S = 240.0  # assumed: neither measured nor published
SORTED, SLICED = ("topk", "leader"), ("micro", "exdyna")  # a leader sorts while the others wait
SCANNED = ("reused", "threshold", "gaussiank", "dgc", "sidco")
SORT_S = 2.18896957e-10  # the top-k of a P102-100 takes s x log2(x) seconds; from the public code of OMGS-SGD
MATRICES, FREQUENCIES, EVERYTHING = "powersgd", "fft", "everything"
# Bytes per element of a matrix method: keep (12) and clear (4) the gradient, copy it to matrices (8), read it in two
# products (8), subtract a third (8), write the update (4) and check it (4). Thin factors, and arithmetic with four
# columns, are left out.
MATRIX_BYTES = 48
# Bytes per element of the transform and its inverse, three passes each that read and write. Frequencies are sorted like
# a top-k of half as many elements, since a frequency has two parts.
TRANSFORM_BYTES = 2 * 3 * 8
CODE_BYTES = 12  # read for the scale (4) and for the code (4), and the mean written (4)
SHARE_BYTES = 20  # copy into shards (8), add received parts (4), put updates in place (8)
SCAN_BYTES, KEEP_BYTES = 4, 16  # compare (4); add and keep residual + gradient (12), clear the gradient (4)


def formula_s(selector: str, numel: float, world_size: int, bytes_per_s: float) -> float:
    """Return the seconds of a method's computation without collectives, by the name of its selector.

    Every method adds the residual and clears the gradient, 16 bytes an element; one with a threshold reads all of it
    once more, 4 bytes, one with exclusive slices reads a share of 1 in ``world_size``; an exact top-k takes s x
    log2(x). PowerSGD's products of matrices with a few columns pass through memory too, and so do quantisers and FFT's
    transforms. Starting a kernel costs nothing.
    """
    if selector == MATRICES:
        return MATRIX_BYTES * numel / bytes_per_s
    if selector == EVERYTHING:
        return CODE_BYTES * numel / bytes_per_s
    if selector == FREQUENCIES:
        return TRANSFORM_BYTES * numel / bytes_per_s + SORT_S * numel / 2 * math.log2(max(numel / 2, 2))
    kept_s = KEEP_BYTES * numel / bytes_per_s
    if selector in SORTED:
        return kept_s + SORT_S * numel * math.log2(max(numel, 2))
    return kept_s + SCAN_BYTES * numel / (world_size if selector in SLICED else 1) / bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """The compared methods, and their computation before sending.

    Attributes:
        reducers: by name of conf/sparsifier, including dense.
        own_s: seconds of computation of a sparse method, from its name, number of elements and number of ranks.
        bytes_per_s: memory bandwidth, for splitting and joining shards with two levels.
    """

    reducers: Mapping[str, micro.Reducer]
    own_s: Callable[[str, float, int], float]
    bytes_per_s: float

    @property
    def sparse(self) -> list[str]:
        """The methods other than dense."""
        return [name for name in self.reducers if name != DENSE]

    def problem(self, trace: Trace, network: Network, method: str) -> Problem:
        """Return a schedule's problem for a method on all ranks of a network."""
        select = partial(self._selection_s, method, network.world_size)
        return problem_of(trace, network, self.reducers[method], select=select)

    def two_level(self, method: str, ranks_per_node: int) -> micro.TwoLevel:
        """Return a method between nodes, with a dense mean within them."""
        return micro.TwoLevel(reducer=self.reducers[method], ranks_per_node=ranks_per_node)

    def two_level_problem(self, trace: Trace, network: NodeNetwork, method: str) -> Problem:
        """Return a schedule's problem for a method between nodes, which selects from a shard."""
        local = network.ranks_per_node

        def select(numel: float) -> float:
            return SHARE_BYTES * numel / self.bytes_per_s + self._selection_s(method, network.num_nodes, numel / local)

        return problem_of(trace, network, self.two_level(method, local), select=select)

    def _selection_s(self, method: str, world_size: int, numel: float) -> float:
        return 0.0 if method == DENSE else self.own_s(method, numel, world_size)


def methods_of(given: Sequence[str], density: float, *, table: Path | None, memory_gb_s: float) -> tuple[Methods, str]:
    """Return the methods, dense first, and a text with the source of their seconds of selection.

    Args:
        given: names of conf/sparsifier; all if empty.
        table: measured seconds of selection; None: a formula.
        memory_gb_s: memory bandwidth in the formula.

    Raises:
        UserError: an unknown method, or one without seconds of selection.
    """
    names = select_names(given, known_methods(), "methods")
    reducers = build_methods(list(dict.fromkeys([DENSE, *names])), density)
    bytes_per_s, sparse = 1e9 * memory_gb_s, [name for name in reducers if name != DENSE]
    if table is None:
        selectors = {name: _selector(name, reducers[name]) for name in sparse}
        origin = "an assumption, neither measured nor published" if memory_gb_s == MEMORY_GB_S else "as given"
        words = f"a formula, with memory of {memory_gb_s:g} GB/s, {origin}"

        def own_s(name: str, numel: float, world_size: int) -> float:
            return formula_s(selectors[name], numel, world_size, bytes_per_s)
    else:
        measured = load_measured(SelectTable, table)
        bases = {name: name.split("+")[0] for name in sparse}  # selection does not depend on the feedback
        if missing := [name for name in bases.values() if name not in measured.methods]:
            held = ", ".join(measured.methods)
            raise UserError(f"{table} holds {held}, not {missing[0]}: measure it, or leave it out of --methods")
        words = f"{table}, measured on {measured.device}, {measured.world_size} ranks, density {measured.density:g}"

        def own_s(name: str, numel: float, world_size: int) -> float:
            return measured.seconds(bases[name], numel)

    return Methods(reducers=reducers, own_s=own_s, bytes_per_s=bytes_per_s), words


def _selector(method: str, reducer: micro.Reducer) -> str:
    selector = reducer.selector.full_name if isinstance(reducer, micro.SparseReducer) else method
    known = (*SORTED, *SLICED, *SCANNED, MATRICES, FREQUENCIES, EVERYTHING)
    if selector not in known:
        raise UserError(
            f"no formula for the selection of {method} ({selector}), only for {', '.join(known)}: measure it "
            "with 'python -m experiments.profile select' and give --select FILE"
        )
    return selector
