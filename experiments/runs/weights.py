"""The weights that a run ends with: told by their digest, kept where asked for."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from experiments.runs.records import cannot_write, flush_folder


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a model's parameters and buffers: names, shapes and bytes, in their order."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(values.shape)}{values.dtype}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a model's state for ``torch.load``, whole or not at all.

    Raises:
        RecordError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        flush_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer has an error of its own for a full disk
        with suppress(OSError):
            draft.unlink()
        raise cannot_write(path, error if isinstance(error, OSError) else OSError(28, os.strerror(28))) from None
