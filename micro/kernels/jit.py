"""Compile loops with numba, and code shared by all of them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba.cpython.printimpl  # noqa: F401 - else imported later, without the print that it is to know
from llvmlite import ir
from numba import njit, types
from numba.core import event
from numba.extending import intrinsic

from micro.warn import warn

MAGNITUDE_BITS = 0x7FFFFFFF  # a float32 without its sign: as an integer it orders like the magnitude
INFINITY_BITS = 0x7F800000  # larger bit patterns are NaN

_NUMBAS_LOG = logging.getLogger("numba")  # it logs each step of the compiler to a program that logs at DEBUG
if _NUMBAS_LOG.level == logging.NOTSET:
    _NUMBAS_LOG.setLevel(logging.WARNING)


def jitted(loop: Callable[..., Any]) -> Any:
    """Return the compiled loop, kept on disk for the next process where numba finds a folder that it can write to."""
    try:
        compiled = njit(nogil=True, cache=True, error_model="numpy")(loop)
    except RuntimeError as error:  # so numba reports a read-only installation whose user has no writable home
        if "cannot cache" not in str(error):
            raise
        _warn_of_no_cache()
        return njit(nogil=True, error_model="numpy")(loop)
    _date(compiled)
    return compiled


def _date(compiled: Any) -> None:
    """Have numba compile a loop again when any file of this folder is newer, for loops of one call those of others.

    numba itself looks at the file of the loop alone. What is set here is not public; where it is not, numba decides.
    """
    kept: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(kept, "_source_stamp"):
        kept._source_stamp = (kept._source_stamp, _files())


@cache
def _files() -> tuple[tuple[str, int, int], ...]:
    """Return name, date and size of every file of this folder."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


@cache
def _warn_of_no_cache() -> None:
    warn(
        "micro compiles its loops again in each process, for numba found no writable folder to keep them in: "
        "set NUMBA_CACHE_DIR to one"
    )


class _AtStart(event.Listener):
    """Calls a function when numba begins to compile, which it does not where it loads what was compiled before."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def on_start(self, event: object) -> None:
        self._call()

    def on_end(self, event: object) -> None:
        """Do nothing."""


@contextmanager
def when_compiling(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` in this context each time numba begins to compile a loop that it does not find on disk."""
    with event.install_listener("numba:compile", _AtStart(call)):
        yield


def _as_float(typingctx: Any, bits: Any) -> Any:
    """Return the float32 whose bit pattern is the int32 ``bits``."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


def _as_bits(typingctx: Any, number: Any) -> Any:
    """Return the bit pattern of a float32 as int32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


def _lowest_bit(typingctx: Any, word: Any) -> Any:
    """Return the place of the lowest bit that is set in ``word``, 64 where none is."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


def _num_bits(typingctx: Any, word: Any) -> Any:
    """Return how many bits of ``word`` are set."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


def _reader(bits: int) -> Any:
    """Return a loop's function ``get(wire, i)``: the i-th word of so many bits, of bytes anywhere, as uint64."""

    def get(typingctx: Any, wire: Any, i: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            loaded = builder.load(_place(context, builder, sig, args, bits))
            loaded.align = 1
            return builder.zext(loaded, ir.IntType(64)) if bits < 64 else loaded

        return types.uint64(wire, types.int64), codegen

    return intrinsic(get)


def _writer(bits: int) -> Any:
    """Return a loop's function ``put(wire, i, word)``: it writes a word's low bits where ``get`` reads them."""

    def put(typingctx: Any, wire: Any, i: Any, word: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            low = builder.trunc(args[2], ir.IntType(bits)) if bits < 64 else args[2]
            builder.store(low, _place(context, builder, sig, args, bits)).align = 1
            return context.get_dummy_value()

        return types.void(wire, types.int64, types.uint64), codegen

    return intrinsic(put)


def _place(context: Any, builder: Any, sig: Any, args: Any, bits: int) -> Any:
    source = context.make_array(sig.args[0])(context, builder, args[0])
    return builder.gep(builder.bitcast(source.data, ir.IntType(bits).as_pointer()), [args[1]])


as_float: Any = intrinsic(_as_float)
as_bits: Any = intrinsic(_as_bits)
lowest_bit: Any = intrinsic(_lowest_bit)
num_bits: Any = intrinsic(_num_bits)
get16, get32, get64 = _reader(16), _reader(32), _reader(64)
put16, put32 = _writer(16), _writer(32)
