"""Run one method on given gradients and measure density, error, bytes, mass and time of selection."""

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import micro
from experiments.tools.shared.gradient_sources import Gradients, wide_sum
from experiments.tools.shared.selection_times import REPEATS, time_topk
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.density.base import target_count

Row = dict[str, Any]
SETTLING_STEPS = 20  # steps before the worst density error counts
KINDS = ("counts", "indices", "values")  # kinds of sent bytes


def trial(method: str, reducer: micro.Reducer, gradients: Gradients, world_size: int) -> tuple[Row, list[Row]]:
    """Run a method on gradients and return its row of means, and a row per step.

    It uses one core, because trials run in parallel, and idle threads of torch would slow the ranks.
    """
    named = {"method": method, "stream": gradients.stream, "world_size": world_size, "numel": gradients.layout.numel}
    with one_thread():
        ledger = _Ledger(micro.Simulation(reducer, gradients.layout, world_size))
        totals = enumerate(gradients.totals(world_size))
        steps = [ledger.step(gradients.of(step, world_size), total) for step, total in totals]
        k = target_count(steps[-1]["target_density"], gradients.layout.numel)
        one_topk_s = time_topk(gradients.rows[0, 0], k, REPEATS)["select_s"]
    return named | _means(steps, ledger.cumulative_error(), one_topk_s), [named | row for row in steps]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch operations of this thread to one thread inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Ledger:
    """Sums of the gradients into simulated ranks and of the updates out of them, in double precision."""

    def __init__(self, simulation: micro.Simulation) -> None:
        self._simulation = simulation
        feedback = getattr(simulation.reducer, "feedback", None)
        self._momentum, self._nesterov = getattr(feedback, "momentum", 0.0), getattr(feedback, "nesterov", False)
        numel = simulation.layout.numel
        self._rows = torch.empty(simulation.world_size, numel)
        self._velocity, self._mean_sum, self._update_sum = torch.zeros(3, numel, dtype=torch.float64).unbind()
        self._acc, self._lost = torch.empty(2, numel, dtype=torch.float64).unbind()
        self._unsent = self._kept("residual")

    def step(self, gradients: Tensor, total: Tensor) -> Row:
        """Reduce one step's gradients (world_size, numel) with sum ``total``; return the measurements."""
        n, numel = gradients.shape
        dense_bytes = 2 * 4 * numel * (n - 1) / n
        added = self._next_velocity(self._kept("momentum"), total)[1] if self._momentum else total
        torch.add(self._unsent, added, out=self._acc)
        self._velocity, mean = self._next_velocity(self._velocity, total / n)
        stats = self._reduce(gradients)
        update = self._rows[0].double()
        self._mean_sum += mean
        self._update_sum += update
        self._unsent = self._kept("residual")
        sent = {kind: statistics.fmean(getattr(s, f"{kind}_bytes") for s in stats) for kind in KINDS}
        return {
            "step": stats[0].step,
            "target_density": stats[0].target_density,
            "density": stats[0].global_density,
            **{key: getattr(stats[0], key) for key in ("density_error", "build_up", "imbalance")},
            **{f"{kind}_share": _ratio(num_bytes, dense_bytes) for kind, num_bytes in sent.items()},
            "step_error": _ratio(float((update - mean).norm()), float(mean.norm())),
            "mass_kept": self._mass_kept(n, update),
            "select_s": min(s.select_s for s in stats),  # ranks share cores: the least is nearest to a rank alone
        }

    def cumulative_error(self) -> float:
        """Return the relative error of the sum of all updates."""
        return _ratio(float((self._update_sum - self._mean_sum).norm()), float(self._mean_sum.norm()))

    def _reduce(self, gradients: Tensor) -> list[micro.StepStats]:
        """Reduce copies of the gradients; each rank copies its own, which is then in its core's caches."""
        sources, copies = gradients.unbind(), self._rows.unbind()

        def copy(comm: Comm) -> Reduction[None]:
            yield from ()
            copies[comm.rank].copy_(sources[comm.rank])

        return self._simulation.step_(self._rows, ahead=copy)

    def _mass_kept(self, num_ranks: int, update: Tensor) -> float:
        """Return the share of the accumulators that is in the update or residual; overwrites their sum."""
        lost = torch.sub(self._acc, self._unsent, out=self._lost).sub_(update, alpha=num_ranks)
        return 1 - _ratio(float(lost.abs_().sum()), float(self._acc.abs_().sum()))

    def _next_velocity(self, velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next momentum and its update; without momentum, the gradient itself."""
        if not self._momentum:
            return gradient, gradient
        if self._nesterov:
            velocity = self._momentum * (velocity + gradient)
            return velocity, velocity + gradient
        velocity = self._momentum * velocity + gradient
        return velocity, velocity

    def _kept(self, name: str) -> Tensor:
        """Return the sum over ranks of the feedback's vector ``name``; zero if there is none."""
        try:
            kept = self._simulation.memory(name)
        except KeyError:
            kept = []
        return wide_sum(kept) if kept and kept[0].numel() else torch.zeros_like(self._mean_sum)


def _means(steps: list[Row], cumulative_error: float, one_topk_s: float) -> Row:
    settled = steps[min(SETTLING_STEPS, len(steps) // 2) :]
    mean = {key: statistics.fmean(row[key] for row in steps) for key in steps[0]}
    shares = {f"{kind}_share": mean[f"{kind}_share"] for kind in KINDS}
    return {
        "steps": len(steps),
        "density": mean["target_density"],
        "mean_density": mean["density"],
        "density_error": mean["density_error"],
        "worst_density_error": max(row["density_error"] for row in settled),
        **{key: mean[key] for key in ("build_up", "imbalance")},
        "bytes_share": sum(shares.values()),
        **shares,
        "step_error": mean["step_error"],
        "cumulative_error": cumulative_error,
        "mass_kept": min(row["mass_kept"] for row in steps),
        "select_topks": statistics.median(row["select_s"] for row in steps) / one_topk_s,
    }


def _ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 if both are 0, NaN if only the whole is."""
    if whole:
        return part / whole
    return math.nan if part else 0.0
