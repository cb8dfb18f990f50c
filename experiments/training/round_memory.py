"""The memory of simulated workers with local steps, each of which has weights and an optimizer of its own."""

import os
import sys

import torch

from experiments.config.builders import build_reducer
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from micro.flat import Layout

GIGABYTE = 1e9
SHARED = 2  # vectors for all workers together: the global weights, and the gradient of the one that computes
INNER = {"adam": 2, "adamw": 2, "sign": 0}  # vectors of an optimizer's state


def bytes_of_rounds(config: TrainConfig, numel: int) -> int:
    """Return the bytes of the workers' vectors at most: in an exchange. Activations and data come on top.

    Args:
        numel: parameters of the model, in single precision.
    """
    has_momentum = config.optimizer.momentum > 0 and config.optimizer.momentum_at == "update"
    inner = INNER.get(config.optimizer.name, int(has_momentum))
    memory = build_reducer(config).start(Layout.flat(1), torch.float32, torch.device("cpu")).memory
    kept = sum(bool(vector.numel()) for vector in memory.values())
    fragments = config.rounds.fragments
    number = fragments if isinstance(fragments, int) else len(fragments)
    exchanged = (2 if config.rounds.delay else 1) / number  # of the difference of weights, and a copy of it
    own = 1 + inner + kept + exchanged
    shared = SHARED + (1 if config.rounds.momentum else 0)
    return int((config.world_size * own + shared) * numel * torch.float32.itemsize)


def check_memory(config: TrainConfig, numel: int) -> None:
    """Raise UserError where the workers need more than this machine has."""
    needed, there = bytes_of_rounds(config, numel), _memory_of_machine()
    if config.cluster.device != "cuda" and needed > there:
        raise UserError(
            f"{config.world_size} simulated workers with weights of their own take {needed / GIGABYTE:.1f} GB, this "
            f"machine has {there / GIGABYTE:.1f} GB: lower cluster.world_size, or take a smaller model"
        )


def announce(config: TrainConfig, numel: int) -> None:
    """Say how much memory the workers take, where it is a gigabyte or more."""
    needed = bytes_of_rounds(config, numel) / GIGABYTE
    if needed >= 1:
        print(
            f"{config.world_size} simulated workers with weights of their own take about {needed:.1f} GB",
            file=sys.stderr,
        )


def _memory_of_machine() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
