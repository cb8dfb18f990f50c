"""The bandwidth of a link up to which a step of a method is shorter than one of dense."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

from experiments.studies.simulated_steps.method_choices import DENSE, Methods
from experiments.studies.simulated_steps.step import EXACT, Row, simulate_step
from micro.planning import costs
from micro.planning.costs import Link
from micro.planning.traces import Trace


def borders(
    trace: Trace, link: Link, methods: Methods, workers: Iterable[int], rates: tuple[float, float]
) -> Iterator[Row]:
    """Yield, for every method and number of workers, up to which rate its step is shorter than that of dense.

    Both under their exact plans, over a ring. The border is 0 where the method never gains, infinite where it still
    does at the highest rate.

    Args:
        link: gives the start-up of a message; what a byte takes follows from the rate.
        rates: the lowest and the highest, in bits per second.
    """
    for world_size in workers:

        @cache
        def step_s(method: str, rate: float, world_size: int = world_size) -> float:
            network = costs.Flat(replace(link, beta_s=8 / rate), world_size)
            problem = methods.problem(trace, network, method, world_size)
            return float(simulate_step(problem, EXACT, world_size)["step_s"])

        for method in methods.sparse:
            border = crossing(lambda rate, method=method: step_s(DENSE, rate) / step_s(method, rate), *rates)  # type: ignore[misc]
            yield {"workers": world_size, "method": method, "border": border}


def crossing(gain: Callable[[float], float], low: float, high: float, halvings: int = 4) -> float:
    """Return where a gain that falls with the rate is 1: by halving between logarithms, then by a line.

    0 where it is below 1 at ``low``, infinity where it is above 1 at ``high``.
    """
    above, below = math.log(gain(low)), math.log(gain(high))
    if below > 0:
        return math.inf
    if above <= 0:
        return 0.0
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        found = math.log(gain(middle))
        if found > 0:
            low, above = middle, found
        else:
            high, below = middle, found
    return float(low * (high / low) ** (above / (above - below)))
