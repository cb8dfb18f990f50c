"""Tests with ranks: one thread per process, and an end of the shared ranks."""

import torch

from tests.dist.processes import close_all


def pytest_collection_finish() -> None:
    """Compute with one thread, as the ranks do: several would wait for a core at each of many small operations."""
    torch.set_num_threads(1)


def pytest_sessionfinish() -> None:
    """End the shared ranks gently, so that they save what coverage measured; pytest-xdist may skip exit handlers."""
    close_all()
