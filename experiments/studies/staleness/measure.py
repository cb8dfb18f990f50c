"""Train with each method and count the updates of every element: how long it waits between two of them."""

import math
from collections.abc import Iterator, Sequence

import pandas as pd
import torch
from torch import Tensor

from experiments.config.errors import UserError
from experiments.studies.recorded_gradients import Training
from experiments.training.preflight import prepare_runs
from micro.flat import Layout

FIXED = ("sparsifier=", "cluster=", "cluster.device=", "cluster.world_size=")  # what the command sets itself


def measured(
    words: Sequence[str], methods: Sequence[str], *, num_steps: int, world_size: int
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Train with each method in turn; yield it and a row per parameter: method, and the columns of `waits`.

    Raises:
        UserError: words that describe no training, or that set what the command does; see also ``Training.steps``.
    """
    for word in words:
        if word.startswith(FIXED):
            raise UserError(f"'{word}': methods, workers and device are options of the command, leave it out")
    fixed = ["cluster=simulated", "cluster.device=cpu", f"cluster.world_size={world_size}"]
    chosen = list(dict.fromkeys(methods))
    configs = prepare_runs([[*words, f"sparsifier={method}", *fixed] for method in chosen])
    for method, config in zip(chosen, configs, strict=True):
        training = Training(config)
        counts = torch.zeros(training.layout.numel, dtype=torch.int32)
        for _ in training.steps(num_steps):
            counts += training.update() != 0
        rows = waits(counts, training.layout, num_steps)
        rows.insert(0, "method", method)
        yield method, rows


def waits(counts: Tensor, layout: Layout, num_steps: int) -> pd.DataFrame:
    """Return a row per parameter that has elements, in the order in which a backward makes their gradients.

    Columns: parameter, numel, density (updates per element and step), median and tail (steps per update of the element
    in the middle, and of the one that a tenth waits longer than; infinite where that element was never updated), never
    (share of its elements that were never updated).

    Args:
        counts: (numel,) how often each element was updated.
    """
    rows = []
    for name, at in layout.slices():
        numel = at.stop - at.start
        if not numel:
            continue
        ordered = counts[at].sort().values
        middle, rare = (int(ordered[math.ceil(share * numel) - 1]) for share in (0.5, 0.1))
        row = {"parameter": name, "numel": numel, "density": float(ordered.double().mean()) / num_steps}
        row |= {"median": num_steps / middle if middle else math.inf, "tail": num_steps / rare if rare else math.inf}
        rows.append(row | {"never": float((ordered == 0).double().mean())})
    return pd.DataFrame(rows)
