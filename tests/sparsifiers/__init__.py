"""THE TABLE: one row per method. Adding a method is adding a row; every law of tests/unit/test_laws.py then holds.

Rows lie in one file per family; every file of this folder that has ROWS adds to the table.
"""

import importlib
import pkgutil

from tests.sparsifiers.base import Outcome, Row


def _table() -> tuple[Row, ...]:
    names = [entry.name for entry in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in sorted(names, key=lambda n: (n != "core", n))]
    return tuple(row for module in modules for row in getattr(module, "ROWS", ()))


TABLE = _table()

__all__ = ["TABLE", "Outcome", "Row"]
