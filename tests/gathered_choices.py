"""A reducer that gathers, step by step beside another implementation of its choice."""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import numpy as np
import torch

import micro

Vector = np.ndarray[Any, np.dtype[np.float64]]


def check_steps(
    reducer: micro.Reducer, gradients: Iterable[Vector], choose: Callable[[Vector, int, int], list[int]]
) -> None:
    """Check that updates and residuals are those of other choices.

    Args:
        gradients: (world_size, d) of each step.
        choose: maps a rank's accumulator (d,), the step and the rank to the indices that the rank sends.
    """
    steps = list(gradients)
    world_size, d = steps[0].shape
    residuals = np.zeros((world_size, d))
    with closing(micro.Simulation(reducer, micro.Layout.flat(d), world_size, dtype=torch.float64)) as simulation:
        for step, grads in enumerate(steps):
            residuals += grads
            update = np.zeros(d)
            for rank in range(world_size):
                chosen = choose(residuals[rank], step, rank)
                update[chosen] += residuals[rank, chosen] / world_size
                residuals[rank, chosen] = 0
            taken = simulation.step(torch.tensor(grads), residuals=True)
            assert taken.residuals is not None
            np.testing.assert_allclose(taken.update.numpy(), update, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(taken.residuals.numpy(), residuals, rtol=1e-12, atol=1e-12)
