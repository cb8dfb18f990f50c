"""What a simulation answers, a frame each: speed-ups, levels, borders of bandwidth, published gains, double trees."""

import time
from collections.abc import Callable, Iterator

import pandas as pd

from experiments.studies.simulated_steps.borders import borders
from experiments.studies.simulated_steps.method_choices import DENSE
from experiments.studies.simulated_steps.networks import NetworkChoice
from experiments.studies.simulated_steps.published_gains import (
    COMPUTES,
    PUBLISHED,
    PUBLISHED_WORKERS,
    cluster_link,
    headline,
    trees,
)
from experiments.studies.simulated_steps.settings import QUESTIONS, Study
from experiments.studies.simulated_steps.step import Row, schedule_for, simulate_levels, simulate_step
from micro.planning.nodes import NodeNetwork
from micro.planning.traces import Trace

LEVELS = ("one", "two")
RATES = (1e8, 1e11)  # bits per second, 100 Mbit/s to 100 Gbit/s
TREE_SCHEDULES = ("layerwise", "single", "mgwfbp")
Frames = dict[str, pd.DataFrame]


def compute(study: Study, show: Callable[[str], object] = lambda line: None) -> Frames:
    """Return a frame of rows for each question, those without rows left out; ``show`` gets a line about each."""
    questions = {
        "steps": _steps,
        "timeline": _timeline,
        "levels": _levels,
        "borders": _borders,
        "headline": _headline,
        "trees": _trees,
    }
    frames = {}
    for name, answer in questions.items():
        if name in QUESTIONS and name not in study.questions:
            continue
        begun = time.perf_counter()
        frame = pd.DataFrame(list(answer(study)))
        if not frame.empty:
            frames[name] = frame
            show(f"{name}: {len(frame)} rows in {time.perf_counter() - begun:.1f} s")
    return frames


def _settings(study: Study) -> Iterator[tuple[Row, Trace, NetworkChoice]]:
    """Yield each model on each network, with what its rows begin with."""
    for trace in study.traces:
        for network in study.networks:
            facts = {"model": trace.model, "network": network.name, "algorithm": network.algorithm}
            yield facts | {"compute_s": trace.compute_s}, trace, network


def _steps(study: Study) -> Iterator[Row]:
    """Yield a row for every number of workers and way to train."""
    for facts, trace, network in _settings(study):
        for workers in network.workers:
            costs_of = network.of(workers)
            for method in study.methods.reducers:
                problem = study.methods.problem(trace, costs_of, method, workers)
                for schedule in (way.schedule for way in study.ways if way.method == method):
                    named = {"workers": workers, "method": method, "schedule": schedule}
                    yield facts | named | simulate_step(problem, schedule, workers)


def _timeline(study: Study) -> Iterator[Row]:
    """Yield when backward, and each group's exchange, begins and ends under each dense schedule, in seconds.

    With as many workers as the published gains are of, or the nearest number that is simulated.
    """
    for facts, trace, network in _settings(study):
        workers = min(network.workers, key=lambda count: abs(count - PUBLISHED_WORKERS))
        problem = study.methods.problem(trace, network.of(workers), DENSE, workers)
        for schedule in (way.schedule for way in study.ways if way.method == DENSE):
            part = schedule_for(problem, schedule)
            step = part.timeline(problem, part.cut(problem))
            named = facts | {"workers": workers, "schedule": schedule}
            yield named | {"what": "backward", "begin_s": 0.0, "end_s": step.backward_s}
            for sent in step.transfers:
                yield named | {"what": "exchange", "begin_s": sent.sent_s, "end_s": sent.done_s}


def _levels(study: Study) -> Iterator[Row]:
    """Yield each method in one level, all workers together, and in two: densely in a node, by the method between."""
    for facts, trace, network in _settings(study) if study.two_level else ():
        for workers in network.workers:
            costs_of = network.of(workers)
            assert isinstance(costs_of, NodeNetwork), "without nodes there is one level"
            for method in study.methods.reducers:
                for levels in LEVELS:
                    named = {"workers": workers, "ranks_per_node": costs_of.ranks_per_node}
                    row = simulate_levels(trace, costs_of, study.methods, method, levels)
                    yield facts | named | {"method": method, "levels": levels} | row


def _borders(study: Study) -> Iterator[Row]:
    workers = [count for count in study.workers if count > 1]
    for trace in study.traces:
        for row in borders(trace, cluster_link(), study.methods, workers, RATES):
            yield {"model": trace.model} | row


def _headline(study: Study) -> Iterator[Row]:
    for trace in study.recorded:
        if trace.model in PUBLISHED:
            published = PUBLISHED[trace.model]
            facts = {
                "model": trace.model,
                "published_layerwise": published.over_layerwise,
                "published_single": published.over_single,
            }
            for row in headline(trace, COMPUTES):
                yield facts | row


def _trees(study: Study) -> Iterator[Row]:
    for trace in study.traces:
        for row in trees(trace, TREE_SCHEDULES, study.workers):
            yield {"model": trace.model} | row
