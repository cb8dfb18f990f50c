"""Every kernel with the dtypes and settings that it mostly meets, for compiling it ahead of time."""

from typing import Any

from experiments.benchmarks.gpu.compiling import Variant

ADDED = "residual:*fp32 grad:*fp32 first_bad:*i32 numel:i32"
NARROW = ADDED.replace("grad:*fp32", "grad:*bf16")
SCANNED = "x:*fp32 threshold:*fp32 numel:i32"
VALUES = "values:*fp32 numel:i32"
DECODED = "scales:*fp32 out:*fp32 is_finite:*i32 rows:i32 row_scales:i32 row_codes:i32 divisor:fp32 numel:i32"


def variants() -> list[Variant]:
    """Return the kernels of methods, then those of quantisers, with the settings that a codec has by default."""
    from micro.kernels.code import Kind
    from micro.kernels.triton import absorbing, decoding, encoding, scanning, summing
    from micro.kernels.triton.launching import BLOCK

    blocks: dict[str, Any] = {"BLOCK": BLOCK}
    limited, rows = {**blocks, "LIMIT": 2.0**100}, encoding.TILE

    def mean(kind: Kind, shared: int, num_bytes: float, dtype: str = "u8") -> Variant:
        constants = {**blocks, "KIND": int(kind), "SHARED": shared, "IS_MEAN": True}
        types, words = f"{DECODED} packed:*{dtype}", f"4, and {num_bytes:g} for each message"
        name = f"{kind.name.lower()}, mean"
        return Variant(name, decoding.decode_kernel, types, constants, words, loads=False, stores=True)

    int8 = {"ROWS": rows // 256, "BLOCK": 256}
    sign = {"ROWS": rows // 1024, "BLOCK": 1024, "HALVINGS": 10}
    put = f"{SCANNED} ends:*i32 indices:*i32 magnitudes:*fp32"
    summed = f"{ADDED} partials:*fp64"
    return [
        Variant("absorb", absorbing.absorb_kernel, ADDED, limited, "16", stores=True, in_place=True),
        Variant(
            "absorb",
            absorbing.absorb_kernel,
            NARROW,
            limited,
            "12",
            "bfloat16 into float32",
            stores=True,
            in_place=True,
        ),
        Variant("count above", scanning.count_kernel, f"{SCANNED} counts:*i32", blocks, "4"),
        Variant("put above", scanning.put_kernel, put, blocks, "4 where a block holds any, and 8 for each"),
        Variant("sums", summing.sum_kernel, "partials:*fp64 numel:i32 x:*fp32 floor:*fp32", blocks, "4"),
        Variant("absorb and sum", summing.absorb_and_sum_kernel, summed, limited, "16", stores=True, in_place=True),
        Variant("int8", encoding.int8_kernel, f"{VALUES} scales:*fp32 codes:*i8", int8, "5"),
        Variant("sign", encoding.signs_kernel, f"{VALUES} means:*fp32 packed:*u8", sign, "4.1"),
        Variant(
            "bfloat16", encoding.cast_kernel, f"{VALUES} codes:*i16", {**blocks, "IS_HALF": False}, "6", stores=True
        ),
        mean(Kind.BFLOAT16, 1, 2.0, "i16"),
        mean(Kind.INT8, 256, 1.0),
        mean(Kind.SIGN, 1024, 0.125),
    ]
