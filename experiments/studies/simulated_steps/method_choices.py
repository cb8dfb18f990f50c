"""The methods of a simulation, and where their seconds of selection come from."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import micro
from experiments.config.errors import UserError
from experiments.studies.methods import build_methods, known_methods, select_names
from experiments.studies.simulated_steps.network_choices import load_measured
from experiments.studies.simulated_steps.selection_formula import SelectionFormula
from experiments.studies.simulated_steps.step import DENSE, Methods
from experiments.training.schedule_problem import Selection
from micro.planning.tables import SelectTable

SelectionOf = Callable[[int], Selection]  # of a number of workers
MEMORY_GB_S = 240.0  # assumed: neither measured nor published


def method_choices(
    given: Sequence[str], density: float, *, table: Path | None, memory_gb_s: float
) -> tuple[Methods, str]:
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
    sparse = {name: reducer for name, reducer in reducers.items() if name != DENSE}
    selection, origin = _by_formula(sparse, memory_gb_s) if table is None else _measured(table, sparse)
    return Methods(reducers=reducers, selection=selection), origin


def _by_formula(sparse: dict[str, micro.Reducer], memory_gb_s: float) -> tuple[SelectionOf, str]:
    selectors = {name: _selector(name, reducer) for name, reducer in sparse.items()}

    def formula(world_size: int) -> Selection:
        return SelectionFormula(selectors=selectors, world_size=world_size, bytes_per_s=1e9 * memory_gb_s)

    formula(1)  # a method without a formula is refused here
    origin = "an assumption, neither measured nor published" if memory_gb_s == MEMORY_GB_S else "as given"
    return formula, f"a formula, with memory of {memory_gb_s:g} GB/s, {origin}"


def _measured(path: Path, sparse: dict[str, micro.Reducer]) -> tuple[SelectionOf, str]:
    table = load_measured(SelectTable, path)
    of = {name: name.split("+")[0] for name in sparse}  # a method with another feedback selects as its yaml does
    missing = [name for name in of.values() if name not in table.methods]
    if missing:
        held = ", ".join(table.methods)
        raise UserError(f"{path} holds {held}, not {missing[0]}: measure it, or leave it out of --methods")
    origin = f"{path}, measured on {table.device}, {table.world_size} ranks, density {table.density:g}"
    own = replace(table, methods={name: table.methods[measured] for name, measured in of.items()})
    return lambda _: own, origin


def _selector(method: str, reducer: micro.Reducer) -> str:
    return reducer.selector.full_name if isinstance(reducer, micro.SparseReducer) else method
