"""Compiled conversions between a float32 and the 16 bits of a half or of a bfloat16, rounded to the nearest."""

import platform
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.jit import INFINITY_BITS, MAGNITUDE_BITS, as_bits, as_float, jitted

LARGEST_HALF = np.float32(65504)
LARGEST_BFLOAT16 = 0x7F7F0000  # as a float32


@cache  # LLVM takes 0.4 ms to say what a processor can do
def converts_halves() -> bool:
    """Tell whether loops are compiled for a processor that converts halves itself; others would need a library."""
    is_host = not numba.config.CPU_NAME and not numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    knows = platform.machine() == "aarch64" or bool(dict(binding.get_host_cpu_features()).get("f16c"))
    return is_host and knows


def _narrowed(typingctx: Any, x: Any) -> Any:
    """Return the half nearest to a float32 that is not beyond the largest."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return builder.zext(half, ir.IntType(32))

    return types.int32(types.float32), codegen


def _widened(typingctx: Any, code: Any) -> Any:
    """Return the float32 that a half, given as int32, stands for."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = builder.bitcast(builder.trunc(args[0], ir.IntType(16)), ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int32), codegen


_narrow: Any = intrinsic(_narrowed)
of_half: Any = intrinsic(_widened)


@jitted
def to_half(x: Any) -> Any:
    """Return the half nearest to a float32, cut at the largest, as int32; NaN stays NaN."""
    cut = LARGEST_HALF if x > LARGEST_HALF else x
    return _narrow(-LARGEST_HALF if cut < -LARGEST_HALF else cut)


@jitted
def to_bfloat16(x: Any) -> Any:
    """Return the bfloat16 nearest to a float32, cut at the largest, as int32; NaN stays NaN."""
    bits = as_bits(x)
    magnitude = np.int32(bits & np.int32(MAGNITUDE_BITS))
    cut = np.int32(min(magnitude, np.int32(LARGEST_BFLOAT16)))
    odd = np.int32(np.int32(cut >> np.int32(16)) & np.int32(1))
    code = np.int32(np.int32(cut + np.int32(0x7FFF) + odd) >> np.int32(16))
    code = np.int32(0x7FC0) if magnitude > np.int32(INFINITY_BITS) else code
    return np.int32(code | (np.int32(bits >> np.int32(16)) & np.int32(0x8000)))


@jitted
def of_bfloat16(code: Any) -> Any:
    """Return the float32 that a bfloat16, given as int32, stands for."""
    return as_float(np.int32(code << np.int32(16)))
