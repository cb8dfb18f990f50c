"""Accumulators (gradient + residual) of a training with top-k and error feedback."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
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
    reducer = micro.SparseReducer(micro.TopK(), density)
    vectors = []
    with closing(Training(training_config(overrides, world_size), reducer=reducer)) as training:
        residual = torch.zeros(training.layout.numel)
        for step, rows in enumerate(training.steps(max(steps) + 1)):
            if step in steps:
                vectors.append(Vector(f"step {step}", rows[0] + residual))
            residual.copy_(training.residual())
    return vectors
