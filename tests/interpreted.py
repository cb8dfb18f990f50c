"""Triton's kernels on the CPU: in a process that imports this first, Triton's interpreter runs them.

Triton looks at TRITON_INTERPRET when it is imported and when a kernel is defined. Test files that import this module
are collected before any test runs, and what tests run imports triton later, if at all. The variable does not stay:
processes that a test starts compile. Where triton is not installed, the tests of a file that imports this are skipped.
"""

import os
import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("triton is not installed: torch's wheels for CUDA on Linux bring it", allow_module_level=True)

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("triton was imported before tests.interpreted, so that its interpreter cannot run")
kept = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    from micro.kernels import triton as kernels
finally:
    if kept is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = kept

__all__ = ["kernels"]
