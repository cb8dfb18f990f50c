"""What ranks compare: settings and weights before the first step, and where each is before every exchange."""

import ctypes
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import real
from micro.requests import AllGather


@contextmanager
def refused_together(comm: Comm, device: torch.device) -> Iterator[None]:
    """Raise a ValueError on every rank where this context raises on any; all ranks enter it."""
    error: ValueError | None = None
    try:
        yield
    except ValueError as caught:
        error = caught
    refused = _rows(comm, device, [error is not None])
    if error is not None:
        raise error
    if any(row[0] for row in refused):
        ranks = [rank for rank, row in enumerate(refused) if row[0]]
        raise ValueError(f"rank {ranks[0]} refused its settings: its own error says why")


def check_equal(settings: Mapping[str, Any], comm: Comm, device: torch.device) -> None:
    """Raise ValueError on all ranks where a setting, plain data by name, is not the same on all of them."""
    said = _rows(comm, device, [_sum_of(json.dumps(value, sort_keys=True).encode()) for value in settings.values()])
    for rank, row in enumerate(said):
        for name, own, first in zip(settings, row, said[0], strict=True):
            if own != first:
                raise ValueError(f"{name} must be the same on all ranks, rank {rank} has another than rank 0")


def check_same_weights(parameters: Mapping[str, Tensor], comm: Comm, device: torch.device) -> None:
    """Raise ValueError on all ranks where a parameter does not have the same bits on all of them."""
    sums = _rows(comm, device, [_sum_of(content_of(real(p.detach()))) for p in parameters.values()])
    for rank, row in enumerate(sums):
        for name, own, first in zip(parameters, row, sums[0], strict=True):
            if own != first:
                raise ValueError(
                    f"weights must be the same on all ranks at the start, '{name}' of rank {rank} differs from rank "
                    "0's: give all ranks one seed, or load the same weights"
                )


def check_same_place(place: Mapping[str, int], comm: Comm, device: torch.device) -> None:
    """Raise RuntimeError on all ranks where they have come to an exchange from different places in the training."""
    said = _rows(comm, device, list(place.values()))
    for rank, row in enumerate(said):
        if row != said[0]:
            words = (", ".join(f"{name} {at}" for name, at in zip(place, r, strict=True)) for r in (said[0], row))
            raise RuntimeError(
                f"ranks must exchange at the same place: rank 0 is at {next(words)}, rank {rank} at {next(words)}"
            )


def _rows(comm: Comm, device: torch.device, numbers: list[int] | list[bool]) -> list[list[int]]:
    row = torch.tensor([int(number) for number in numbers], dtype=torch.int64, device=device)
    rows: list[list[int]] = comm.answer(AllGather(mine=row)).tolist()  # host sync: once a round, ranks act on it
    return rows


def _sum_of(content: bytes) -> int:
    return zlib.crc32(content)


def content_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's numbers."""
    here = tensor.contiguous().cpu()
    return ctypes.string_at(here.data_ptr(), here.numel() * here.element_size()) if here.numel() else b""
