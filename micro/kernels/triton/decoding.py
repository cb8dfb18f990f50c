"""What the codes of messages stand for: their sum, divided.

Messages are rows (R, bytes) that may begin at any address, so that scales are copied to where they can be read.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.triton.launching import BLOCK, kernel, launch, num_programs, places


@kernel
def _read(
    scales: tl.tensor, packed: tl.tensor, offsets: tl.tensor, mask: tl.tensor, KIND: tl.constexpr, SHARED: tl.constexpr
) -> tl.tensor:
    """Return what a message of a `Kind` holds, of which ``SHARED`` values share a scale."""
    if KIND == 2:
        codes = tl.load(packed + offsets, mask=mask, other=0).to(tl.int8, bitcast=True)
        values = codes.to(tl.float32) * tl.load(scales + offsets // SHARED, mask=mask, other=0)
    elif KIND == 3:
        found = tl.load(packed + offsets // 8, mask=mask, other=0).to(tl.int32)
        mean = tl.load(scales + offsets // SHARED, mask=mask, other=0)
        values = tl.where(((found >> (offsets % 8)) & 1) == 1, -mean, mean)
    elif KIND == 0:
        values = tl.load(packed + offsets, mask=mask, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        patterns = tl.load(packed + offsets, mask=mask, other=0).to(tl.int32) << 16
        values = patterns.to(tl.float32, bitcast=True)
    return values


@kernel
def decode_kernel(
    scales: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    is_finite: tl.tensor,
    rows: tl.tensor,
    row_scales: tl.tensor,
    row_codes: tl.tensor,
    divisor: tl.tensor,
    numel: tl.tensor,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    IS_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write to ``out`` (numel,) what a message holds, or a mean of ``rows``.

    ``is_finite`` (1,) int32 becomes 0 where what is written is not finite.
    """
    offsets, mask = places(numel, BLOCK)
    total = _read(scales, packed, offsets, mask, KIND, SHARED)
    if IS_MEAN:
        for row in range(1, rows):
            far = tl.cast(row, tl.int64)
            total += _read(scales + far * row_scales, packed + far * row_codes, offsets, mask, KIND, SHARED)
        total = tl.div_rn(total, tl.full(total.shape, divisor, tl.float32))
    tl.store(out + offsets, total, mask=mask)
    bad = mask & ((tl.abs(total) < float("inf")) == 0)
    if tl.sum(bad.to(tl.int32)) > 0:
        tl.store(is_finite, 0)


def decode(kind: int, scales: Tensor, codes: Tensor, out: Tensor, *, shared: int = 1, divisor: float = 1.0) -> Tensor:
    """Fill ``out`` (numel,) with the sum of R messages, divided.

    Args:
        kind: of the messages.
        scales: (R, m), contiguous; ``shared`` values have one.
        codes: (R, bytes or more).

    Returns:
        () bool, whether all of ``out`` is finite.
    """
    is_finite = torch.ones(1, dtype=torch.int32, device=out.device)
    rows = codes.shape[0]
    strides = (scales.stride(0), codes.stride(0)) if rows > 1 else (0, 0)
    constants: dict[str, Any] = {"KIND": kind, "SHARED": shared, "IS_MEAN": rows > 1 or divisor != 1}
    arguments = (scales, codes, out, is_finite, rows, *strides, divisor, out.numel())
    launch(decode_kernel, num_programs(out.numel()), out, *arguments, **constants, BLOCK=BLOCK)
    return is_finite.view(()) > 0
