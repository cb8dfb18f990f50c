"""The parts of ``bench gpu`` in order: the measurement, ranks and table of each."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from experiments.tools.bench.gpu import compiling, timing, training
from experiments.tools.bench.gpu.variants import variants
from experiments.tools.bench.tables import Column, Columns
from experiments.tools.ranks.measures import Row
from experiments.tools.shared.gradient_sources import fitting_scale, layered
from experiments.tools.shared.methods import build_methods
from micro.simulate import Simulation

Shape = Literal["one", "two", "each"]
"""The ranks of a part: one alone; two over NCCL if there are as many GPUs; over NCCL one on each GPU.
On a CPU all are two over gloo, but for the first."""
SIMULATED, STEPS = 8, 5
EACH = ("methods",)  # names in a part with a row for each requested method


class Part(NamedTuple):
    """A table whose rows are measured by one call per name.

    Attributes:
        title: of its section.
        names: each gives one or several rows.
        work: returns the rows of a name on every rank; those of rank 0 are used.
        columns: of its table.
        ranks: called together.
        limit_s: time limit for all names together.
        needs_card: whether it cannot run on a CPU.
    """

    title: str
    names: Sequence[str]
    work: Callable[[training.Settings, str], list[Row]]
    columns: Columns
    ranks: Shape = "one"
    limit_s: float = 60
    needs_card: bool = False


def kernels_right(settings: training.Settings, name: str) -> list[Row]:
    """Compare every kernel with torch on the device; a difference is an error."""
    from micro.kernels.triton import checking

    checking.check(training.device_of(settings))
    return [{"name": name, "problem": ""}]


def kernels_timed(settings: training.Settings, name: str) -> list[Row]:
    """Time the kernels of methods, compared with a copy."""
    return list(timing.kernel_rows(training.device_of(settings), settings.numel))


def compiled(settings: training.Settings, name: str) -> list[Row]:
    """Compile the kernels for other GPUs."""
    return list(compiling.compiled(variants()))


def against_cpu(settings: training.Settings, method: str) -> list[Row]:
    """Compare steps of simulated ranks on the device with those on the CPU."""
    numel = min(settings.numel, 2**20)
    layout, worst, places = layered(numel), 0.0, 0
    reducer = build_methods([method], training.DENSITY)[method]
    both = [Simulation(reducer, layout, SIMULATED, device=each) for each in ("cpu", training.device_of(settings))]
    randomness = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        grads = fitting_scale(training.DENSITY, numel) * torch.randn(SIMULATED, numel, generator=randomness)
        expected, found = (each.step(grads.to(each.device)).update.cpu() for each in both)
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)))
        places += int(((found != 0) != (expected != 0)).sum())
    return [{"name": method, "difference": worst, "places": places, "problem": ""}]


NAMED: Columns = {"": Column("name")}
PROBLEM: Columns = {"problem": Column("problem")}
COMPARED: Columns = {
    **NAMED,
    "largest difference": Column("difference", "{:.1e}"),
    "other places": Column("places", "{:.0f}"),
    **PROBLEM,
}
PARTS = {
    "kernels": Part(
        "Kernels against torch", ("all",), kernels_right, {**NAMED, **PROBLEM}, limit_s=180, needs_card=True
    ),
    "timed": Part("Kernels, timed", ("all",), kernels_timed, timing.KERNELS, needs_card=True),
    "compiled": Part("Compiled ahead of time", ("all",), compiled, compiling.COLUMNS, limit_s=120),
    "methods": Part(
        f"{STEPS} steps of {SIMULATED} simulated ranks, beside the CPU", EACH, against_cpu, COMPARED, "one", 120
    ),
    "steps": Part("DDP", (*training.HOOKS, *EACH), training.ddp, training.STEP, "each", 240),
    "fsdp": Part("FSDP2", training.SHARDED, training.fsdp, training.STEP, "two", 90),
}
