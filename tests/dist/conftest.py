"""End the ranks that tests share when the tests end: a worker of pytest-xdist may leave without its exit handlers."""

from tests.dist.processes import close_all


def pytest_sessionfinish() -> None:
    """End them gently, so that they save what coverage measured."""
    close_all()
