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

from micro import kernels as dispatch
from micro.kernels import triton as kernels
from micro.kernels.triton import codes as _codes  # noqa: F401  # which are imported later else, as compiled kernels

assert os.environ.get("TRITON_INTERPRET") == "1", "import this before any test runs"

__all__ = ["kernels", "serving_the_cpu"]


@contextmanager
def serving_the_cpu() -> Iterator[None]:
    """Let the kernels serve tensors of the CPU, which the interpreter runs; what they do not serve is plain torch's."""
    one_at_a_time, run = threading.Lock(), GridExecutor.__call__

    def locked(self: GridExecutor, *arguments: object, **more: object) -> object:
        with one_at_a_time:  # the interpreter knows one program at a time, simulated ranks are threads
            return run(self, *arguments, **more)

    dispatch._runs.cache_clear()
    with (
        patch.object(GridExecutor, "__call__", locked),
        patch.dict(os.environ, TRITON_INTERPRET="1"),  # Triton imports more of itself when it first runs a kernel
        patch.object(kernels, "check", lambda device: None),
        patch.object(dispatch, "_is_gpu", lambda device: True),
        patch.object(dispatch, "_with_numba", lambda: None),
    ):
        yield
    dispatch._runs.cache_clear()
