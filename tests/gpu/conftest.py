"""Tests on GPUs use the shared ranks of tests/dist."""

from tests.dist.conftest import pytest_collection_finish, pytest_runtest_teardown, pytest_sessionfinish

__all__ = ["pytest_collection_finish", "pytest_runtest_teardown", "pytest_sessionfinish"]
