"""Whether the codes of a GPU are the bits that a codec gives in torch: asked once for each codec and device."""

import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from micro import kernels
from micro.randomness import generator

if TYPE_CHECKING:
    from micro.codecs.fused import FusedCodec

KEY = (7, 3, 1, 0)
MESSAGES = 3
DIVISOR = 2.0  # of their mean: a power of two, by which all devices divide alike
NUMEL = 9001  # whole blocks and a short one, in several programs of a kernel
AT_ENDS = (1e-40, -3.4e38, 65_519.0, 65_536.0)  # of single precision, and of half


def serving(codec: "FusedCodec", *values: Tensor) -> ModuleType | None:
    """Return the module of the codes that serves these float32 values and agrees with torch, else None."""
    loops = kernels.codes_for(codec.code, *values)
    if loops is None or values[0].device.type == "cpu":
        return loops
    return loops if agrees(codec, values[0].device) else None


@cache
def agrees(codec: "FusedCodec", device: torch.device) -> bool:
    """Tell whether a GPU's messages of ``codec``, and what they are read as, are torch's; warn where they are not."""
    from micro.kernels.triton import codes

    try:
        made = pairs(codec, vector(NUMEL), device, codes)
        problem = "" if all(torch.equal(*pair) for pair in made) else "what they give is not what torch gives"
    except Exception as error:  # whatever Triton, the driver or the C compiler raise
        problem = str(error)
    if problem:
        warnings.warn(f"torch does the work of the kernels of codec {codec.name} on {device}: {problem}", stacklevel=2)
    return not problem


def pairs(codec: "FusedCodec", values: Tensor, device: torch.device, loops: ModuleType) -> list[tuple[Tensor, Tensor]]:
    """Return what the codes give and what the codec gives in torch: messages, values, what is left of them, a mean.

    None of settings for which there are no codes.
    """
    code, numel = codec.code, values.numel()
    if code is None or not loops.serves(code):
        return []
    wire = codec.encode_in_torch(values.clone(), KEY)
    expected = codec.decode_in_torch(wire, numel, torch.float32)
    memory = torch.empty(MESSAGES, wire.numel() + 1, dtype=torch.uint8, device=device)  # few begin at whole numbers
    messages, source = memory[:, :-1], values.to(device)
    left, decoded, mean = (torch.empty(numel, device=device) for _ in range(3))
    for message in messages[:2]:
        loops.encode(code, source, message, left)
    messages[2:] = messages[1]
    is_finite = torch.as_tensor(loops.decode(code, messages[1:2], decoded))
    loops.decode(code, messages, mean, DIVISOR)
    return [
        *((message.cpu(), wire) for message in messages[:2]),
        (decoded.cpu(), expected),
        (left.cpu(), values - expected),
        (mean.cpu(), ((expected + expected) + expected) / DIVISOR),
        (is_finite.cpu(), torch.isfinite(expected).all()),
    ]


def vector(numel: int) -> Tensor:
    """Return values (numel,) with zeros, a block of zeros, and numbers at the ends of the range."""
    values = torch.randn(numel, generator=generator(0, numel))
    values[::11] = 0.0
    values[1024:2048] = 0.0
    values[2050:2054] = torch.tensor(AT_ENDS)[: max(numel - 2050, 0)]
    return values
