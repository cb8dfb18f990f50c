"""What all kernels share: how they are compiled, how a vector is split over their programs, and what they can take.

A program of a kernel takes BLOCK neighbouring elements. GPUs load 16 bytes at a time only where the compiler can prove
that a mask does not cut through them. So all programs but the last stop at the last whole ALIGNED elements, and the
last takes those few that are left.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a program: eight of each of its 128 threads
ALIGNED = 16  # elements; Triton also compares lengths and addresses with 16 when it decides on the width of a load
LONGEST = 2**31 - 2**17  # elements: places within the blocks beyond the end are whole numbers of 32 bits too
NUMBERS = ("numel", "first", "second", "shift", "num_bins", "room", "rows", "row_scales", "row_codes", "divisor")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def kernel(body: Callable[..., Any]) -> Any:
    """Return ``body`` as a Triton kernel, or as what Triton's interpreter runs where TRITON_INTERPRET is set.

    Numbers are not specialised: Triton would compile again where one becomes 1, or a multiple of 16, and ranks do not
    come to that in the same step.
    """
    numbers = [name for name in signature(body).parameters if name in NUMBERS]
    return triton.jit(body, do_not_specialize=numbers)


@kernel
def each_block(
    numel: tl.tensor,
    BODY: tl.constexpr,
    arguments: tl.tuple,
    CONSTANTS: tl.tuple,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Call ``BODY(arguments, CONSTANTS, block, offsets, mask)`` with the elements of this program, of ``numel`` in all.

    The constants are apart because to give what is in a tuple a name makes it a number that the compiler does not know,
    unless the name is declared as a constant.
    """
    block = tl.program_id(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        offsets = block * BLOCK + lanes
        BODY(arguments, CONSTANTS, block, offsets, offsets < whole)
    else:
        offsets = whole + lanes
        BODY(arguments, CONSTANTS, block, offsets, offsets < numel)


def takes(*tensors: Tensor) -> bool:
    """Tell whether the kernels can take these tensors: plain, contiguous, of a dtype that they know, not too long.

    Subclasses of Tensor are refused, fake tensors among them: they have no memory to point to.
    """
    return all(
        type(x) in (Tensor, torch.nn.Parameter) and x.is_contiguous() and x.dtype in DTYPES and x.numel() <= LONGEST
        for x in tensors
    )


def num_programs(numel: int, block: int) -> int:
    """Return the programs for ``numel`` elements: one for each block of whole ALIGNED elements, one for the rest."""
    return -(-(numel // ALIGNED * ALIGNED) // block) + 1


def launch(
    kernel: Any, programs: int, tensor: Tensor, *arguments: object, num_warps: int = 4, **constants: Any
) -> None:
    """Start ``programs`` programs of ``kernel`` on the current stream of the GPU on which ``tensor`` lies."""
    with torch.cuda.device_of(tensor):
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)
