"""How loops are compiled with numba, and what all of them share."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

MAGNITUDE_BITS = 0x7FFFFFFF  # a float32 without its sign: as an integer it orders like the magnitude
INFINITY_BITS = 0x7F800000  # larger bit patterns are NaN


def jitted(loop: Callable[..., Any]) -> Any:
    """Return the compiled loop, kept on disk for the next process where numba finds a folder that it can write to."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(loop)
    except RuntimeError as error:  # so numba reports a read-only installation whose user has no writable home
        if "cannot cache" not in str(error):
            raise
        _warn_of_no_cache()
        return njit(nogil=True, error_model="numpy")(loop)


@cache
def _warn_of_no_cache() -> None:
    warnings.warn(
        "micro compiles its loops anew in each process, for numba found no writable folder to keep them in: "
        "set NUMBA_CACHE_DIR to one",
        stacklevel=2,
    )


def _as_float(typingctx: Any, bits: Any) -> Any:
    """Return the float32 whose bit pattern is the int32 ``bits``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


def _get16(typingctx: Any, wire: Any, i: Any) -> Any:
    """Return the ``i``-th 16 bits of the bytes ``wire``, which may lie at an odd place, as int32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = _place(context, builder, sig, args, ir.IntType(16))
        loaded = builder.load(place)
        loaded.align = 1
        return builder.zext(loaded, ir.IntType(32))

    return types.int32(wire, types.int64), codegen


def _put16(typingctx: Any, wire: Any, i: Any, code: Any) -> Any:
    """Make the low 16 bits of ``code`` the ``i``-th of the bytes ``wire``, which may lie at an odd place."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = _place(context, builder, sig, args, ir.IntType(16))
        builder.store(builder.trunc(args[2], ir.IntType(16)), place).align = 1
        return context.get_dummy_value()

    return types.void(wire, types.int64, types.int32), codegen


def _place(context: Any, builder: Any, sig: Any, args: Any, element: ir.IntType) -> Any:
    source = context.make_array(sig.args[0])(context, builder, args[0])
    return builder.gep(builder.bitcast(source.data, element.as_pointer()), [args[1]])


as_float: Any = intrinsic(_as_float)
get16: Any = intrinsic(_get16)
put16: Any = intrinsic(_put16)
