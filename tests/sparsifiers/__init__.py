"""THE TABLE: one row per method. Adding a method is adding a row; every law of tests/unit/test_laws.py then holds."""

from tests.sparsifiers import core, estimated, others, quantisers, scopes
from tests.sparsifiers.base import Row

TABLE: tuple[Row, ...] = core.ROWS + estimated.ROWS + others.ROWS + quantisers.ROWS + scopes.ROWS

__all__ = ["TABLE", "Row"]
