"""Crash at a chosen moment of what changes the disk."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHANGES = [(os, "write"), (os, "fsync"), (os, "replace"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree")]


class Crash(BaseException):
    """Stands for a kill: a BaseException, so that no handler of errors catches it."""


@contextmanager
def crash_at(
    moment: int, monkeypatch: pytest.MonkeyPatch, functions: Sequence[tuple[Any, str]] = CHANGES
) -> Iterator[None]:
    """Raise `Crash` in place of call number ``moment``, from 0, of these functions (owner and name), and of all later.

    What a context manager would do at its end, a killed process does not do. A crash in write or rmtree comes in the
    middle of it: half of the data is written, one file is gone.
    """
    count = 0
    write, rmtree = os.write, shutil.rmtree

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 < moment:
                return function(*arguments, **options)
            if count - 1 == moment and function is write:
                write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            if count - 1 == moment and function is rmtree:
                for path in sorted(path for path in Path(arguments[0]).glob("*") if path.is_file())[:1]:
                    path.unlink()
            raise Crash

        return call

    with monkeypatch.context() as patch:
        for owner, name in functions:
            patch.setattr(owner, name, guarded(getattr(owner, name)))
        yield
