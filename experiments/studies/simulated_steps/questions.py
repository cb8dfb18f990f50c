"""What a simulation answers, a frame each: speed-ups, borders of bandwidth, published gains, double trees."""

import time
from collections.abc import Callable, Iterator

import pandas as pd

from experiments.studies.simulated_steps.borders import borders
from experiments.studies.simulated_steps.levels import both_levels
from experiments.studies.simulated_steps.network_choices import NetworkChoice
from experiments.studies.simulated_steps.published_gains import COMPUTES, PUBLISHED, cluster_link, headline, trees
from experiments.studies.simulated_steps.settings import Study
from experiments.studies.simulated_steps.step import Row, speedups
from micro.planning.traces import Trace

RATES = (1e8, 1e11)  # bits per second, 100 Mbit/s to 100 Gbit/s
TREE_SCHEDULES = ("layerwise", "single", "mgwfbp")
Frames = dict[str, pd.DataFrame]


def compute(study: Study, show: Callable[[str], object] = lambda line: None) -> Frames:
    """Return a frame of rows for each question, those without rows left out; ``show`` gets a line about each."""
    questions = {"steps": _steps, "levels": _levels, "borders": _borders, "headline": _headline, "trees": _trees}
    frames = {}
    for name, answer in questions.items():
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
    for facts, trace, network in _settings(study):
        for row in speedups(trace, network.of, study.methods, study.ways, network.workers):
            yield facts | row


def _levels(study: Study) -> Iterator[Row]:
    for facts, trace, network in _settings(study) if study.two_level else ():
        for row in both_levels(trace, network.of, study.methods, network.workers):
            yield facts | row


def _borders(study: Study) -> Iterator[Row]:
    link, workers = cluster_link(), [count for count in study.workers if count > 1]
    for trace in study.traces:
        for row in borders(trace, link, study.methods, workers, RATES):
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
