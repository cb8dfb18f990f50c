"""Triton's kernels against torch on a GPU; tests run them in Triton's interpreter, without one."""

import torch
from torch import Tensor

import micro
from micro.codecs import coding
from micro.codecs.base import Codec
from micro.values.randomness import generator

LENGTH = 4200  # of what is coded: whole blocks and a short one
KEY = (7, 3, 1, 0)
NUM_MESSAGES = 3
DIVISOR = 2.0  # of their mean: a power of two, by which all devices divide alike
AT_ENDS = (1e-40, -3.4e38, 65_519.0, 65_536.0)  # of single precision, and of half


def problems(device: torch.device) -> dict[str, str]:
    """Return how the kernels of methods, and those of each codec, differ from torch; empty where they do not."""
    from micro.kernels.triton import checking, codes

    found = {"kernels of methods": ""}
    try:
        checking.check(device)
    except Exception as error:  # the report names it, whatever it is
        found["kernels of methods"] = f"{type(error).__name__}: {error}"
    codecs = {name: micro.build(Codec, name) for name in micro.known(Codec)}
    served = {name: codec for name, codec in codecs.items() if codec.code and codes.serves(codec.code)}
    return found | {name: _problem(codec, device) for name, codec in served.items()}


def _problem(codec: Codec, device: torch.device) -> str:
    try:
        made = coded(codec, device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if all(torch.equal(*pair) for pair in made) else "other bits than torch's"


def coded(codec: Codec, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return what the codes of a device give and what the codec gives in torch: messages, values, a mean, and so on."""
    values = torch.randn(LENGTH, generator=generator(0, LENGTH))
    values[::11] = values[1024:2048] = 0.0
    values[2050:2054] = torch.tensor(AT_ENDS)
    wire = codec.encode(values.clone(), KEY)
    expected = codec.decode(wire, LENGTH, torch.float32)
    messages = torch.empty(NUM_MESSAGES, wire.numel() + 1, dtype=torch.uint8, device=device)[
        :, :-1
    ]  # at odd places too
    left, decoded, mean = (torch.empty(LENGTH, device=device) for _ in range(3))
    for message in messages:
        coding.encode_(codec, values.to(device), KEY, message, left)
    is_finite = torch.as_tensor(coding.decode_mean_(codec, messages[1:2], decoded))
    coding.decode_mean_(codec, messages, mean, DIVISOR)
    return [
        *((message.cpu(), wire) for message in messages),
        (decoded.cpu(), expected),
        (left.cpu(), values - expected),
        (mean.cpu(), ((expected + expected) + expected) / DIVISOR),
        (is_finite.cpu(), torch.isfinite(expected).all()),
    ]
