"""The final weights of a run: their digest, and their file if the run saves them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from experiments.runs.files import atomic_file


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a model's parameters and buffers: names, shapes and bytes, in their order."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(values.shape)}{values.dtype}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a model's state for ``torch.load``, whole or not at all. Raises: CannotWrite."""
    with atomic_file(path) as file:
        write_by_torch({name: tensor.detach().cpu() for name, tensor in weights.items()}, file)


def write_by_torch(value: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a value as torch.save does. Raises: OSError, where torch would raise one of its own for a full disk."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
