"""Build the problem that a schedule solves, from a trace of a model, a network and a method."""

from functools import cache, lru_cache, partial

import micro
from experiments.planning.costs import Network
from experiments.planning.nodes import seconds_of
from experiments.planning.schedules.base import Messages, Problem, Seconds, no_time
from experiments.planning.traces import Trace
from micro.predicted_traffic import Volume, volume_of


def problem_of(
    trace: Trace,
    network: Network,
    reducer: micro.Reducer,
    *,
    select: Seconds | None = None,
) -> Problem:
    """Return the problem of scheduling the reduction of a trace's gradients by ``reducer`` over a network.

    A single worker neither sends nor selects.

    Args:
        select: seconds of the method's selection over the number of elements; the dense method has none.

    Raises:
        ValueError: from the problem's costs: ranks of two levels on a network of one speed.
    """
    world_size = network.world_size
    if world_size == 1:
        return Problem(trace, no_time)
    size, layout = trace.element_bytes, trace.layout

    def volume(num_bytes: float) -> Volume:
        whole = layout is not None and round(num_bytes / size) == layout.numel
        return group_volume(reducer, round(num_bytes / size), world_size, size, layout if whole else None)

    @cache  # a schedule needs the same groups many times
    def exchange(num_bytes: float) -> float:
        return seconds_of(volume(num_bytes), network)

    @cache
    def selection(num_bytes: float) -> float:
        assert select is not None
        return select(num_bytes / size)

    @cache
    def messages(num_bytes: float) -> tuple[tuple[float, float], ...]:
        calls = volume(num_bytes).calls
        latencies = [network.seconds(op, 0.0) for op, _ in calls]
        return tuple(
            (latency, max(network.seconds(op, sent) - latency, 0.0))
            for latency, (op, sent) in zip(latencies, calls, strict=True)
        )

    if isinstance(reducer, micro.DenseReducer):
        return Problem(trace, exchange)
    selecting = no_time if select is None else selection
    if not reducer.shares_rounds:
        return Problem(trace, exchange, selecting)
    return Problem(trace, partial(one_round, messages), selecting, messages=messages)


def one_round(messages: Messages, num_bytes: float) -> float:
    """Return what a group adds to a step whose groups share rounds: one latency, and all of its transfers."""
    costs = messages(num_bytes)
    return max((latency for latency, _ in costs), default=0.0) + sum(transfer for _, transfer in costs)


@lru_cache(maxsize=2**16)  # it does not depend on the network
def group_volume(
    reducer: micro.Reducer, numel: int, world_size: int, element_bytes: int, layout: micro.Layout | None = None
) -> Volume:
    """Return what ``reducer`` sends for a group of gradients of so many elements, whose shapes may be known."""
    return volume_of(reducer, numel, world_size, layout=layout, element_bytes=element_bytes)
