"""Triton's kernels on the CPU, run by Triton's interpreter, which tests/conftest.py switches on.

Where triton is not installed, the tests of a file that imports this are skipped.
"""

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("triton is not installed: torch's wheels for CUDA on Linux bring it", allow_module_level=True)

from micro.kernels import triton as kernels

assert os.environ.get("TRITON_INTERPRET") == "1", "import this before any test runs"

__all__ = ["kernels"]
