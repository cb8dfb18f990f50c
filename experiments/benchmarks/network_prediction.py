"""Profiles taken on the hosts of ``experiments.bench network``, and the time of a step that follows from them."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import micro
from experiments.benchmarks.network_methods import MethodProfile, profile_methods
from experiments.benchmarks.network_settings import NetworkSettings, Setup
from experiments.benchmarks.network_training import CPU, FP16, POWERSGD
from experiments.profiles import backward, link
from experiments.ranks.group import RankGroup
from experiments.ranks.hosts import bits_per_s
from experiments.ranks.measures import Row, Settings
from experiments.studies.simulated_steps.trace_changes import rescaled
from experiments.training.schedule_problem import one_round, problem_of
from micro.planning.schedules.base import Problem, Schedule
from micro.planning.tables import Curve, LinkTable
from micro.planning.traces import Trace

PROFILED_STEPS = 8
LINK_SIZES = (64, 4096, 65_536)  # latency alone, and what a packet of TCP holds
LARGEST_S, LARGEST_BYTES = 0.1, 2**22  # the largest message takes so long, but is no larger: beyond, time is linear
REPEATS = 15


@dataclass(frozen=True, slots=True)
class Profiles:
    """What was measured whatever the rate of the links is: of the model, and of each method that computes, by name."""

    trace: Trace
    methods: Mapping[str, MethodProfile]

    def slowed(self, factor: float) -> "Profiles":
        """Return the same with all computation longer by a factor."""
        trace = rescaled(self.trace, factor * self.trace.compute_s)
        return Profiles(trace, {name: method.slowed(factor) for name, method in self.methods.items()})


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step takes, from what was measured of the model, of the methods and of the link.

    Attributes:
        ahead_s: by how much a link that has rested is ahead of its rate. Collectives were measured one right after the
            other; between two steps links rest.
    """

    profiles: Profiles
    network: LinkTable
    ahead_s: float = 0.0

    def problem(self, setup: Setup, *, slower: float = 1.0) -> Problem | None:
        """Return what a schedule decides on; None where it was not measured what the method computes.

        Args:
            slower: by how much computation now takes longer than when it was profiled.
        """
        if setup.method == POWERSGD:
            return None
        profiles, n = self.profiles.slowed(slower), self.network.world_size
        if measured := profiles.methods.get(setup.method):
            return self._measured_problem(measured, profiles.trace, shares=setup.shares_rounds)
        return problem_of(profiles.trace, self.network, setup.reducer, n)

    def _measured_problem(self, measured: MethodProfile, trace: Trace, *, shares: bool) -> Problem:
        """Return the problem of a method that was profiled.

        Args:
            shares: whether its buckets share rounds of messages, so that latencies are not in series.
        """
        size = trace.element_bytes

        def messages(num_bytes: float) -> tuple[tuple[float, float], ...]:
            return measured.messages(num_bytes / size, self.network)

        def in_series(num_bytes: float) -> float:
            return measured.exchange_s(num_bytes / size, self.network)

        return Problem(
            trace,
            exchange=partial(one_round, messages) if shares else in_series,
            select=lambda num_bytes: measured.select_s(num_bytes / size),
            messages=messages if shares else None,
        )

    def schedule(self, setup: Setup) -> Schedule:
        """Return the schedule that makes a method's buckets."""
        own = "ddp" if setup.config.sparsifier.is_dense else "single"
        return setup.schedule or micro.build(Schedule, own)

    def step(self, setup: Setup, *, compute_s: float) -> dict[str, float]:
        """Return the seconds of a step, and its parts that can be compared; NaN where they cannot be predicted.

        Args:
            compute_s: what a step without communication took beside the steps that are predicted: the machine may have
                become slower or faster since the profiles, on which the plan was made.
        """
        planned, now = self.problem(setup), self.problem(setup, slower=compute_s / self.profiles.trace.compute_s)
        if planned is None or now is None:
            return dict.fromkeys(("predicted_s", "predicted_exposed_s", "predicted_select_s"), math.nan)
        schedule = self.schedule(setup)
        found = schedule.timeline(now, schedule.cut(planned))
        ahead_s = min(self.ahead_s, found.exposed_s)
        return {
            "predicted_s": found.step_s - ahead_s,
            "predicted_exposed_s": found.exposed_s - ahead_s,
            "predicted_select_s": found.backward_s - now.trace.backward_s,
        }


def take_profiles(settings: NetworkSettings, ranks: RankGroup) -> Profiles:
    """Measure the model and the sparse methods on the ranks."""
    words = [word for word in settings.overrides if not word.startswith("density=")]
    options = argparse.Namespace(steps=PROFILED_STEPS, overrides=words)
    rows = _profiled(ranks, backward, backward.prepare(options, settings.num_hosts))
    trace = backward.merge(rows)
    computing = [s.method for s in settings.setups if s.method == FP16 or not s.config.sparsifier.is_dense]
    if not computing:
        return Profiles(trace, {})
    in_buckets = {s.method for s in settings.setups if s.schedule or s.method == FP16}
    methods = {method: method in in_buckets for method in computing}
    found = ranks.call(profile_methods, methods, settings.density, settings.overrides, PROFILED_STEPS)[0]
    return Profiles(trace, {name: MethodProfile(**fields) for name, fields in found.items()})


def _profiled(ranks: RankGroup, profile: ModuleType, settings: Settings) -> list[Row]:
    rows: list[Row] = ranks.call(profile.work, settings, CPU, _no_progress)[0]
    return rows


def _no_progress() -> None:
    """Show no progress of the ranks: this process does."""


def measure_link(settings: NetworkSettings, ranks: RankGroup, rate: str) -> LinkTable:
    """Measure the collectives on the ranks, whose links have a rate now."""
    largest = min(LARGEST_BYTES, max(LINK_SIZES[-1] * 8, round(LARGEST_S * bits_per_s(rate) / 8)))
    sizes = [*LINK_SIZES, largest // 16 * 4, largest // 4 * 4]
    options = argparse.Namespace(sizes=sizes, repeats=REPEATS, seconds=settings.link_s)
    rows = _profiled(ranks, link, link.prepare(options, settings.num_hosts))
    curves: dict[Any, Curve] = {
        row["op"]: Curve(sizes=tuple(row["sizes"]), seconds=tuple(row["seconds"])) for row in rows
    }
    return LinkTable(world_size=settings.num_hosts, backend="gloo", link=rate, collectives=curves)
