"""Triton's kernels on the CPU, run by Triton's interpreter, which tests/conftest.py switches on.

Where triton is not installed, the tests of a file that imports this are skipped.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest

if find_spec("triton") is None:
    pytest.skip("triton is not installed: torch's wheels for CUDA on Linux bring it", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor

from micro import kernels
from micro.kernels.triton import checking  # with all others: later they would be compiled

assert os.environ.get("TRITON_INTERPRET") == "1", "import this before any test runs"


@contextmanager
def serving_the_cpu() -> Iterator[list[object]]:
    """Let the kernels serve tensors of the CPU, which the interpreter runs; what they do not serve is plain torch's.

    What is given is the kernels that were run.
    """
    one_at_a_time, run, launched = threading.Lock(), GridExecutor.__call__, list[object]()

    def locked(self: GridExecutor, *arguments: object, **more: object) -> object:
        launched.append(self)
        with one_at_a_time:  # the interpreter knows one program at a time, simulated ranks are threads
            return run(self, *arguments, **more)

    kernels._runs.cache_clear()
    kernels._operations.cache_clear()
    with (
        patch.object(GridExecutor, "__call__", locked),
        patch.dict(os.environ, TRITON_INTERPRET="1"),  # Triton imports more of itself when it first runs a kernel
        patch.object(checking, "check", lambda device: None),
        patch.object(kernels, "_is_gpu", lambda device: True),
        patch.object(kernels, "TRIED", ("triton",)),
    ):
        yield launched
    kernels._runs.cache_clear()
    kernels._operations.cache_clear()
