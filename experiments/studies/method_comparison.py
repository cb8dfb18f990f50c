"""What each method makes of the same gradients: density, error, bytes, mass, time of selection."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import micro
from experiments.config.builders import build_reducer
from experiments.config.compose import CONF
from experiments.config.errors import UserError, suggestion
from experiments.studies.gradient_sources import Gradients, fitting_scale, layered
from experiments.training.preflight import prepare_runs
from micro.density import target_count
from micro.randomness import generator

Row = dict[str, Any]
SETTLED = 20  # steps that a controller is given before its worst density error counts
WARMUP = 2
NO_OPTIMIZER = (
    "optimizer.momentum=0",
    "optimizer.nesterov=none",
)  # a method that holds the momentum itself refuses another
KINDS = ("counts", "indices", "values")


def known_methods() -> list[str]:
    """Return the names of conf/sparsifier."""
    return sorted(path.stem for path in (CONF / "sparsifier").glob("*.yaml"))


def chosen(given: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Return the words given, each once; all that are known where none is given.

    Raises:
        UserError: a word is not known.
    """
    for word in given:
        if word not in known:
            raise UserError(f"{what} must be among {', '.join(known)}, got '{word}'{suggestion(word, known)}")
    return list(dict.fromkeys(given)) or list(known)


def build_methods(names: Sequence[str], density: float) -> dict[str, micro.Reducer]:
    """Return the reducer of each method as training would build it from its yaml.

    Raises:
        UserError: a density outside (0, 1], or a yaml that describes no method.
    """
    configs = prepare_runs([[f"sparsifier={name}", f"density={density!r}", "optimizer.momentum=0"] for name in names])
    return {name: build_reducer(config) for name, config in zip(names, configs, strict=True)}


def trial(method: str, reducer: micro.Reducer, gradients: Gradients, world_size: int) -> tuple[Row, list[Row]]:
    """Run a method on gradients and return its row of means, and a row per step."""
    simulation = micro.Simulation(reducer, gradients.layout, world_size)
    try:
        ledger = _Ledger(simulation)
        steps = [ledger.step(gradients.of(step, world_size)) for step in range(len(gradients.rows))]
    finally:
        simulation.close()
    named = {"method": method, "stream": gradients.stream, "world_size": world_size, "numel": gradients.layout.numel}
    k = target_count(steps[-1]["target_density"], gradients.layout.numel)
    one_topk_s = time_topk(gradients.rows[0, 0], k)
    return named | _means(steps, one_topk_s), [named | row for row in steps]


class _Ledger:
    """What goes in and what comes out of a simulation, added up in double precision."""

    def __init__(self, simulation: micro.Simulation) -> None:
        self._simulation = simulation
        feedback = getattr(simulation.reducer, "feedback", None)
        self._momentum, self._nesterov = getattr(feedback, "momentum", 0.0), getattr(feedback, "nesterov", False)
        numel = simulation.layout.numel
        self._velocity, self._asked, self._given = torch.zeros(3, numel, dtype=torch.float64).unbind()

    def step(self, gradients: Tensor) -> Row:
        """Reduce one step's gradients (world_size, numel) and return what was measured."""
        n, numel = gradients.shape
        total = gradients.sum(0, dtype=torch.float64)
        acc = self._kept("residual") + self._pushed(self._kept("momentum"), total)[1]
        self._velocity, asked = self._pushed(self._velocity, total / n)
        rows = gradients.clone()
        stats = self._simulation.step_(rows)
        update = rows[0].double()
        self._asked += asked
        self._given += update
        lost = acc - self._kept("residual") - n * update
        own = stats[0]
        dense_bytes = 2 * 4 * numel * (n - 1) / n
        return {
            "step": own.step,
            "target_density": own.target_density,
            "density": own.global_density,
            "density_error": own.density_error,
            "build_up": own.build_up,
            "imbalance": own.imbalance,
            **{f"{kind}_share": _ratio(_mean(stats, f"{kind}_bytes"), dense_bytes) for kind in KINDS},
            "step_error": _ratio(float((update - asked).norm()), float(asked.norm())),
            "cumulative_error": _ratio(float((self._given - self._asked).norm()), float(self._asked.norm())),
            "mass_kept": 1 - _ratio(float(lost.abs().sum()), float(acc.abs().sum())),
            "select_s": min(s.select_s for s in stats),  # ranks share the cores: the least is nearest to one's own
        }

    def _pushed(self, velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next momentum, and what it asks to be applied: the gradient itself where there is none."""
        if self._nesterov:
            velocity = self._momentum * (velocity + gradient)
            return velocity, velocity + gradient
        velocity = self._momentum * velocity + gradient
        return velocity, velocity

    def _kept(self, name: str) -> Tensor:
        """Return the sum over ranks of what the feedback keeps under ``name``, zero where it keeps nothing."""
        try:
            kept = self._simulation.memory(name)
        except KeyError:
            kept = []
        total = torch.zeros_like(self._asked)
        for vector in kept:
            if vector.numel():
                total += vector
        return total


def _means(steps: list[Row], one_topk_s: float) -> Row:
    settled = steps[min(SETTLED, len(steps) // 2) :]

    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in steps)

    shares = {f"{kind}_share": mean(f"{kind}_share") for kind in KINDS}
    return {
        "steps": len(steps),
        "density": mean("target_density"),
        "mean_density": mean("density"),
        "density_error": mean("density_error"),
        "worst_density_error": max(row["density_error"] for row in settled),
        "build_up": mean("build_up"),
        "imbalance": mean("imbalance"),
        "bytes_share": sum(shares.values()),
        **shares,
        "step_error": mean("step_error"),
        "cumulative_error": steps[-1]["cumulative_error"],
        "mass_kept": min(row["mass_kept"] for row in steps),
        "select_topks": statistics.median(row["select_s"] for row in steps) / one_topk_s,
    }


def timing_gradient(numel: int, density: float) -> Tensor:
    """Return normal gradients (numel,) to time a selection on; their scale is that of the drawn streams."""
    return fitting_scale(density, numel) * torch.randn(numel, generator=generator(0, numel))


def reference_times(gradient: Tensor, density: float) -> dict[str, float]:
    """Return the median seconds of torch.topk and of one read of ``gradient`` (numel,)."""
    return {"torch.topk": time_topk(gradient, target_count(density, gradient.numel())), "one read": time_read(gradient)}


def time_selection(reducer: micro.Reducer, gradient: Tensor, repeats: int) -> float:
    """Return the median seconds that one rank, alone, takes to choose indices; 0 where a method chooses none."""
    comm = micro.SoloComm()
    numel = gradient.numel()
    state = reducer.start(layered(numel), gradient.dtype, gradient.device)
    grad, seconds = torch.empty_like(gradient), []
    for step in range(WARMUP + repeats):
        turn = int(torch.randint(numel, (1,), generator=generator(step)))
        torch.cat([gradient[turn:], gradient[:turn]], out=grad)  # values that no earlier step had in these places
        comm.begin_step()
        seconds.append(reducer.reduce_(state, grad, comm).select_s)
    return statistics.median(seconds[WARMUP:])


def time_topk(gradient: Tensor, k: int) -> float:
    """Return the median seconds of torch.topk on the magnitudes of ``gradient`` (numel,)."""
    return _timed(lambda: torch.topk(gradient.abs(), k, sorted=False), 3)


def time_read(gradient: Tensor) -> float:
    """Return the median seconds of one read of ``gradient`` (numel,): its sum."""
    return _timed(gradient.sum, 9)


def _timed(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _mean(stats: Sequence[micro.StepStats], key: str) -> float:
    return statistics.fmean(getattr(s, key) for s in stats)


def _ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 where both are 0, NaN where there is no whole to compare with."""
    if whole:
        return part / whole
    return math.nan if part else 0.0
