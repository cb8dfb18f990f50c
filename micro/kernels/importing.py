"""Import compiled kernels in programs that may have replaced ``builtins.print``.

On import, numba looks up ``print`` by module and name, and fails if it finds another function. Training programs often
replace it by one that prints only on rank 0.
"""

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import RLock
from types import BuiltinFunctionType, ModuleType
from typing import Any

_PRINT: Any = builtins.print  # that of Python, unless a program replaced it before it imported micro
_LOCK = RLock()  # of two threads the second must not take the first one's print for the program's


def import_form(name: str) -> ModuleType:
    """Return a module of micro.kernels, imported while ``builtins.print`` is the one that numba expects."""
    with _LOCK, _print_that_numba_knows():
        return import_module(f"micro.kernels.{name}")


@contextmanager
def _print_that_numba_knows() -> Iterator[None]:
    """Restore ``builtins.print`` in this context, and put back what the program had there."""
    own = builtins.print
    if isinstance(own, BuiltinFunctionType):
        yield
        return
    known: Any = _PRINT if isinstance(_PRINT, BuiltinFunctionType) else _found_as_builtin(own)
    builtins.print = known
    try:
        yield
    finally:
        if builtins.print is known:  # else another thread has replaced it meanwhile, and that is to stay
            builtins.print = own


def _found_as_builtin(own: Callable[..., object]) -> Callable[..., None]:
    """Return a function that prints as ``own`` does, and that numba finds in builtins."""

    def print(*values: object, **settings: Any) -> None:
        own(*values, **settings)

    print.__module__ = "builtins"
    return print
