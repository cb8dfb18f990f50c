"""Every kernel with the dtypes and settings that it mostly meets, for compiling it ahead of time."""

from typing import Any

from experiments.benchmarks.gpu.compiling import Variant

ADDED = "residual:*fp32 grad:*fp32 first_bad:*i32 numel:i32"
SCANNED = "x:*fp32 threshold:*fp32 numel:i32"
INT8 = "values:*fp32 numel:i32 scales:*fp32 codes:*i8"
DECODED = (
    "scales:*fp32 packed:*u8 out:*fp32 is_finite:*i32 rows:i32 row_scales:i32 row_codes:i32 divisor:fp32 numel:i32"
)


def variants() -> list[Variant]:
    """Return the kernels of methods, then those of quantisers, with the settings that a codec has by default."""
    return [*_of_methods(), *_encoding(), *_decoding()]


def _of_methods() -> list[Variant]:
    from micro.kernels.triton import absorbing, scanning, summing
    from micro.kernels.triton.launching import BLOCK

    blocks = {"BLOCK": BLOCK}
    limited = {**blocks, "LIMIT": 2.0**100}
    narrow = ADDED.replace("grad:*fp32", "grad:*bf16")
    put = f"{SCANNED} ends:*i32 indices:*i32 magnitudes:*fp32"
    binned = "x:*fp32 bins:*i32 first:i32 shift:i32 num_bins:i32 numel:i32"
    summed = "partials:*fp64 numel:i32"
    two_kinds = "bfloat16 into float32"
    return [
        Variant("absorb", absorbing.absorb_kernel, ADDED, limited, "16", 16, stores=True),
        Variant("absorb", absorbing.absorb_kernel, narrow, limited, "12", 12, two_kinds, stores=True),
        Variant("count above", scanning.count_kernel, f"{SCANNED} counts:*i32", blocks, "4", 4),
        Variant("put above", scanning.put_kernel, put, blocks, "4 where a block holds any, and 8 for each", 4),
        Variant("count by magnitude", scanning.histogram_kernel, binned, {**blocks, "NUM_BINS": 2048}, "4", 4),
        Variant("sums", summing.sum_kernel, f"{summed} x:*fp32 floor:*fp32", blocks, "4", 4),
        Variant(
            "absorb and sum", summing.absorb_and_sum_kernel, f"{ADDED} partials:*fp64", limited, "16", 16, stores=True
        ),
    ]


def _encoding() -> list[Variant]:
    from micro.kernels.triton import encoding
    from micro.kernels.triton.launching import BLOCK

    def rows(block: int, **constants: Any) -> dict[str, Any]:
        return {"ROWS": encoding.TILE // block, "BLOCK": block, **constants}

    signs = "values:*fp32 numel:i32 means:*fp32 packed:*u8"
    cast = "values:*fp32 numel:i32 codes:*i16"
    bfloat16 = {"BLOCK": BLOCK, "IS_HALF": False}
    return [
        Variant("int8", encoding.int8_kernel, INT8, rows(256), "5", 5),
        Variant("sign", encoding.signs_kernel, signs, rows(1024, HALVINGS=10), "4.1", 4.125),
        Variant("bfloat16", encoding.cast_kernel, cast, bfloat16, "6", 6, stores=True),
    ]


def _decoding() -> list[Variant]:
    from micro.kernels.code import Kind

    return [_decoder(Kind.BFLOAT16, 1, 2.0), _decoder(Kind.INT8, 256, 1.0), _decoder(Kind.SIGN, 1024, 0.125)]


def _decoder(kind: int, shared: int, num_bytes: float) -> Variant:
    from micro.kernels.code import Kind
    from micro.kernels.triton import decoding
    from micro.kernels.triton.launching import BLOCK

    types = DECODED.replace("packed:*u8", "packed:*i16") if kind == Kind.BFLOAT16 else DECODED
    return Variant(
        f"{Kind(kind).name.lower()}, mean",
        decoding.decode_kernel,
        types,
        {"KIND": int(kind), "SHARED": shared, "IS_MEAN": True, "BLOCK": BLOCK},
        f"4, and {num_bytes:g} for each message",
        4 + num_bytes,
        loads=False,
        stores=True,
    )
