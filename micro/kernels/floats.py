"""Compiled conversions between a float32 and the 16 bits of a half or of a bfloat16, rounded to the nearest."""

from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from micro.kernels.jit import INFINITY_BITS, MAGNITUDE_BITS, as_bits, as_float, jitted

LARGEST_HALF = 0x477FE000  # 65504 as a float32
SMALLEST_HALF = 0x38800000  # 2^-14: below it halves are multiples of 2^-24
LARGEST_BFLOAT16 = 0x7F7F0000
HALF_NAN = 0x7E00
NARROW_BY = 13  # bits of mantissa that half precision lacks
REBIAS = 112 << 23  # between the exponents of single and of half precision


@jitted
def half_by_bits(x: Any) -> Any:
    """Return the half nearest to a float32, cut at the largest, as int32; NaN stays NaN."""
    bits = as_bits(x)
    magnitude = np.int32(bits & np.int32(MAGNITUDE_BITS))
    cut = np.int32(min(magnitude, np.int32(LARGEST_HALF)))
    odd = np.int32(cut >> np.int32(NARROW_BY)) & np.int32(1)
    normal = np.int32(np.int32(cut + np.int32(0xFFF) + odd - np.int32(REBIAS)) >> np.int32(NARROW_BY))
    small = np.int32(np.rint(as_float(np.int32(min(cut, np.int32(SMALLEST_HALF)))) * np.float32(2.0**24)))
    code = normal if cut >= np.int32(SMALLEST_HALF) else small
    code = np.int32(HALF_NAN) if magnitude > np.int32(INFINITY_BITS) else code
    return np.int32(code | (np.int32(bits >> np.int32(16)) & np.int32(0x8000)))


@jitted
def of_half_by_bits(code: Any) -> Any:
    """Return the float32 that a half, given as int32, stands for."""
    magnitude = np.int32(code & np.int32(0x7FFF))
    normal = as_float(np.int32((magnitude << np.int32(NARROW_BY)) + np.int32(REBIAS)))
    value = normal if magnitude >= np.int32(0x400) else np.float32(magnitude) * np.float32(2.0**-24)
    endless = as_float(np.int32((magnitude << np.int32(NARROW_BY)) + np.int32(2 * REBIAS)))  # or no number
    value = endless if magnitude >= np.int32(0x7C00) else value
    return -value if code >= np.int32(0x8000) else value


def _narrowed(typingctx: Any, x: Any) -> Any:
    """Return the half nearest to a float32 that is not beyond the largest, by the processor's own instruction."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))
        return builder.zext(half, ir.IntType(32))

    return types.int32(types.float32), codegen


def _widened(typingctx: Any, code: Any) -> Any:
    """Return the float32 that a half stands for, by the processor's own instruction."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        half = builder.bitcast(builder.trunc(args[0], ir.IntType(16)), ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int32), codegen


_narrow: Any = intrinsic(_narrowed)


@jitted
def half_by_processor(x: Any) -> Any:
    """Return what `half_by_bits` does; the NaN may be another."""
    largest = np.float32(65504)
    cut = largest if x > largest else x
    cut = -largest if cut < -largest else cut
    return _narrow(cut)


def _converts() -> bool:
    """Tell whether the loops are compiled for a processor that converts halves; others would need a library."""
    is_host = not numba.config.CPU_NAME and not numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    return is_host and bool(dict(binding.get_host_cpu_features()).get("f16c"))


to_half = half_by_processor if _converts() else half_by_bits
of_half: Any = intrinsic(_widened) if _converts() else of_half_by_bits


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
