"""Accumulators (gradient + residual) of a training with top-k and error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

import micro
from experiments.studies.recorded_gradients import Training, training_config


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector to look at: its name, and its values (d,)."""

    name: str
    values: Tensor


def accumulators(overrides: list[str], world_size: int, density: float, steps: Sequence[int]) -> list[Vector]:
    """Train with top-k and error feedback; return rank 0's gradient + residual at each of ``steps``.

    Raises:
        UserError: no such training.
    """
    training = Training(training_config(overrides, world_size))
    simulation = micro.Simulation(micro.SparseReducer(micro.TopK(), density), training.layout, world_size)
    vectors = []
    try:
        for step, rows in enumerate(training.steps(max(steps) + 1)):
            if step in steps:
                vectors.append(Vector(f"step {step}", rows[0] + simulation.residuals()[0]))
            simulation.step_(rows)
    finally:
        simulation.close()
    return vectors
