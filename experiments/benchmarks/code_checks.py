"""The quantisers' kernels against the codecs in torch, bit for bit."""

import torch
from torch import Tensor

from micro.codecs import agreeing
from micro.codecs.fused import FusedCodec
from micro.codecs.half import BFloat16, Half
from micro.codecs.int8 import Int8
from micro.codecs.natural import Natural
from micro.codecs.natural_published import PublishedNatural
from micro.codecs.onebit import OneBit
from micro.codecs.qsgd import QSGD
from micro.codecs.qsgd_published import PublishedQSGD
from micro.codecs.sign import Sign
from micro.codecs.terngrad import TernGrad
from micro.codecs.terngrad_published import PublishedTernGrad

CODECS: dict[str, FusedCodec] = {
    "half": Half(),
    "bfloat16": BFloat16(),
    "natural": Natural(),
    "natural, published": PublishedNatural(),
    "int8": Int8(),
    "int8, stochastic": Int8(stochastic=True),
    "qsgd, 2 bits": QSGD(bits=2),
    "qsgd, 4 bits": QSGD(bits=4),
    "qsgd, 8 bits": QSGD(bits=8),
    "qsgd, published": PublishedQSGD(),
    "terngrad": TernGrad(),
    "terngrad, published": PublishedTernGrad(),
    "sign": Sign(),
    "onebit": OneBit(),
}


def pairs(name: str, numel: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return what the kernels give and what the codec gives in torch; see `micro.codecs.agreeing`."""
    from micro.kernels.triton import codes

    return agreeing.pairs(CODECS[name], agreeing.vector(numel), device, codes)
