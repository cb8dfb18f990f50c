"""Train with each method and count the updates of every element."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict

import pandas as pd

from experiments.config.errors import UserError
from experiments.studies.recorded_gradients import Training
from experiments.studies.staleness.counts import Staleness
from experiments.training.preflight import prepare_runs

FIXED = ("sparsifier=", "cluster=", "cluster.device=", "cluster.world_size=")  # what the command sets itself


def measured(
    words: Sequence[str], methods: Sequence[str], *, num_steps: int, world_size: int
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Train with each method in turn; yield it and a row per parameter: method, parameter, and what `Waits` has.

    Parameters come in the order in which a backward makes their gradients.

    Raises:
        UserError: words that describe no training, or that set what the command does; see also ``Training.steps``.
    """
    for word in words:
        if word.startswith(FIXED):
            raise UserError(f"'{word}': methods, workers and device are options of the command, leave it out")
    fixed = ["cluster=simulated", "cluster.device=cpu", f"cluster.world_size={world_size}"]
    configs = prepare_runs([[*words, f"sparsifier={method}", *fixed] for method in methods])
    for method, config in zip(methods, configs, strict=True):
        with closing(Training(config)) as training:
            staleness = Staleness(training.layout)
            for _ in training.steps(num_steps):
                staleness.observe(training.update())
        rows = [
            {"method": method, "parameter": name} | asdict(waits) for name, waits in staleness.by_parameter().items()
        ]
        yield method, pd.DataFrame(rows)
