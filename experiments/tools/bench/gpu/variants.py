"""Every kernel with its usual dtypes and settings, to compile ahead of time."""

from typing import Any

from experiments.tools.bench.gpu.compiling import Variant

ADDED = "residual:*fp32 grad:*fp32 first_bad:*i32 numel:i32"
NARROW = ADDED.replace("grad:*fp32", "grad:*bf16")
SCANNED = "x:*fp32 threshold:*fp32 numel:i32"


def variants() -> list[Variant]:
    """Return the kernels of methods."""
    from micro.kernels.triton import absorbing, scanning, summing
    from micro.kernels.triton.launching import BLOCK

    blocks: dict[str, Any] = {"BLOCK": BLOCK}
    limited = {**blocks, "LIMIT": 2.0**100}
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
    ]
