"""Triton's kernels against torch on a GPU; tests run them in Triton's interpreter, without one."""

import torch

import micro
from micro.codecs import agreeing
from micro.codecs.base import Codec
from micro.codecs.fused import FusedCodec

LENGTH = 4200  # of what is coded: whole blocks and a short one


def problems(device: torch.device) -> dict[str, str]:
    """Return how the kernels of methods, and those of each codec, differ from torch; empty where they do not."""
    from micro.kernels.triton import checking

    found = {"kernels of methods": ""}
    try:
        checking.check(device)
    except Exception as error:  # the report names it, whatever it is
        found["kernels of methods"] = f"{type(error).__name__}: {error}"
    codecs = {name: micro.build(Codec, name) for name in micro.known(Codec)}
    served = {name: codec for name, codec in codecs.items() if isinstance(codec, FusedCodec)}
    return found | {name: _problem(codec, device) for name, codec in served.items()}


def _problem(codec: FusedCodec, device: torch.device) -> str:
    from micro.kernels.triton import codes

    try:
        made = agreeing.pairs(codec, agreeing.vector(LENGTH), device, codes)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if all(torch.equal(*pair) for pair in made) else "other bits than torch's"
