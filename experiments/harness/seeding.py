"""Randomness of a run: everything follows from its seed, the step and the rank."""

import torch

import data


def seed_model(seed: int) -> None:
    """Seed what draws a model's first weights; the same on all ranks."""
    torch.manual_seed(data.mix(seed))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed what a forward pass draws (dropout), so that it depends on nothing that ran before."""
    torch.manual_seed(data.mix(seed, step, rank))
