"""Tests with ranks: one thread per process, and an end of the shared ranks."""

from pathlib import Path

import pytest
import torch

from tests.dist.processes import close_all

FOLDERS = {Path(__file__).parent, Path(__file__).parents[1] / "gpu"}  # whose tests share ranks


def pytest_collection_finish() -> None:
    """Compute with one thread, as the ranks do: several would wait for a core at each of many small operations."""
    torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared ranks when the next test is in another folder: they take memory."""
    if nextitem is None or not FOLDERS & set(nextitem.path.parents):
        close_all()


def pytest_sessionfinish() -> None:
    """End the shared ranks gently, so that they save what coverage measured; pytest-xdist may skip exit handlers."""
    close_all()
