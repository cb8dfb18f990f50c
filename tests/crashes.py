"""Crash at a chosen moment of what changes the disk."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Crash(BaseException):
    """Stands for a kill: a BaseException, so that no handler of errors catches it."""


@contextmanager
def crash_at(
    moment: int,
    functions: Sequence[tuple[Any, str]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    for_good: bool = False,
) -> Iterator[None]:
    """Raise `Crash` in place of call number ``moment``, from 0, of these functions (owner and name).

    A crash in rmtree comes in the middle of it: one file is gone. With ``for_good`` all later calls raise as well: what
    a context manager would do at its end, a killed process does not do.
    """
    count = 0
    rmtree = shutil.rmtree

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 == moment or (for_good and count > moment):
                if function is rmtree:
                    files = sorted(path for path in Path(arguments[0]).glob("*") if path.is_file())
                    for path in files[:1]:
                        path.unlink()
                raise Crash
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for owner, name in functions:
            patch.setattr(owner, name, guarded(getattr(owner, name)))
        yield
