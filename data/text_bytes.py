"""The vocabulary of a text that is read byte by byte."""

import torch
from torch import Tensor

NUM_BYTES = 256
BYTES = tuple(chr(byte) if 32 < byte < 127 else f"<{byte:02x}>" for byte in range(NUM_BYTES))


def one_each() -> Tensor:
    """Return the length (NUM_BYTES,) int64 of each word of the vocabulary: one byte."""
    return torch.ones(NUM_BYTES, dtype=torch.int64)
