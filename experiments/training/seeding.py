"""The random numbers of a forward pass: they depend on seed, step and rank alone."""

import torch

import data


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the generator of a forward pass (dropout), so that its numbers do not depend on earlier steps.

    This seeds only the generator of ``device``: torch.manual_seed visits every kind of
    accelerator and takes half a millisecond.
    """
    if device.type == "cuda":
        torch.cuda.manual_seed(data.mix(seed, step, rank))
    else:
        torch.default_generator.manual_seed(data.mix(seed, step, rank))
