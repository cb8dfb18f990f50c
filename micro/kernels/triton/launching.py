"""Compile and launch Triton kernels: supported tensors, and how a vector is split over programs.

A program processes BLOCK consecutive elements. If a vector's length and address are multiples of 16, Triton loads 16
bytes at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a program: eight of each of its 128 threads
LENGTHS = range(2, 2**31 - 2**17)  # within 32 bits also beyond the end; Triton would compile for a length of 1 alone
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def kernel(body: Callable[..., Any]) -> Any:
    """Return ``body`` as a Triton kernel, or as what Triton's interpreter runs where TRITON_INTERPRET is set.

    Lengths are the only numbers that kernels take: Triton compiles again where one becomes a multiple of 16.
    """
    return triton.jit(body)


@kernel
def places(numel: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the places (BLOCK,) of this program's elements, and which of them there are."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < numel


def takes(*tensors: Tensor) -> bool:
    """Tell whether the kernels can take these tensors: plain, contiguous, of a dtype and a length that they know.

    Subclasses of Tensor are refused, fake tensors among them: they have no memory to point to.
    """
    return all(
        type(x) in (Tensor, torch.nn.Parameter) and x.is_contiguous() and x.dtype in DTYPES and x.numel() in LENGTHS
        for x in tensors
    )


def num_programs(numel: int, block: int = BLOCK) -> int:
    """Return the programs for ``numel`` elements, one at least."""
    return max(-(-numel // block), 1)


def launch(
    kernel: Any, programs: int, tensor: Tensor, *arguments: object, num_warps: int = 4, **constants: Any
) -> None:
    """Start ``programs`` programs of ``kernel`` on the current stream of the GPU on which ``tensor`` lies."""
    with torch.cuda.device_of(tensor):
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)
