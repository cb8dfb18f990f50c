"""Read weights from state dicts or safetensors files, and compute their bits and digests for patches."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from micro.drivers.meeting import content_of
from micro.values.flat import real

SPAN = 1 << 24  # elements processed at a time: bounds memory, and indices fit in int32
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
Weights = Mapping[str, Tensor] | str | os.PathLike[str]  # a state dict, or the path of a safetensors file
Kind = tuple[str, tuple[int, ...]]  # dtype and shape


def digest(weights: Weights) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bits, independent of the tensors' order."""
    return total({name: digest_of(name, tensor) for name, tensor in checked(weights, "weights").items()})


def total(digests: Mapping[str, bytes]) -> str:
    """Return the digest of weights from the digests of their tensors."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def digest_of(name: str, tensor: Tensor) -> bytes:
    """Return the SHA-256 of one tensor, including its name."""
    found = hashlib.sha256(json.dumps([name, *kind(tensor)]).encode())
    for piece in bits(tensor).reshape(-1).split(SPAN):
        found.update(content_of(piece))
    return found.digest()


def bits(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bits as integers; with shape (..., 2) if it is complex."""
    numbers = real(tensor)
    return numbers.view(WORDS[numbers.element_size()])


def kind(tensor: Tensor) -> Kind:
    """Return dtype and shape of a tensor."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def checked(weights: Weights, what: str) -> dict[str, Tensor]:
    """Return the tensors sorted by name. Raises ValueError naming one that is not dense."""
    if isinstance(weights, str | os.PathLike):
        weights = safetensors().torch.load_file(os.fspath(weights))
    if not isinstance(weights, Mapping):
        raise ValueError(f"{what} must be a state dict or a safetensors file, got {type(weights).__name__}")
    for name, tensor in weights.items():
        is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not hasattr(tensor, "to_local")
        if not is_plain or tensor.is_meta or tensor.is_quantized:
            raise ValueError(
                f"{what} must be dense tensors, '{name}' is not: leave it out, or give a shard's to_local()"
            )
    return {name: weights[name].detach() for name in sorted(weights)}


def check_same(expected: Mapping[str, Kind], weights: Mapping[str, Tensor], what: tuple[str, str]) -> None:
    """Raise ValueError naming the first tensor that is missing on one side or differs in dtype or shape."""
    given = {name: kind(tensor) for name, tensor in weights.items()}
    for name in sorted(expected.keys() | given.keys()):
        one, other = ("{} {}".format(*each[name]) if name in each else "none" for each in (expected, given))
        if one != other:
            raise ValueError(f"tensors must be the same, of '{name}' {what[0]} has {one}, {what[1]} {other}")


def safetensors() -> Any:
    """Return the package. Raises ImportError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files of weights need the package safetensors: install it, or give state dicts") from error
    return safetensors
