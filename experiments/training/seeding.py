"""Randomness of a run: everything follows from its seed, the step and the rank."""

import torch

import data


def seed_model(seed: int) -> None:
    """Seed what draws a model's first weights; the same on all ranks."""
    torch.manual_seed(data.mix(seed))


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed what a forward pass draws (dropout), so that it depends on nothing that ran before.

    Only the generator of ``device``: torch.manual_seed visits every kind of accelerator and takes half a millisecond.
    """
    if device.type == "cuda":
        torch.cuda.manual_seed(data.mix(seed, step, rank))
    else:
        torch.default_generator.manual_seed(data.mix(seed, step, rank))
