"""Saved state as it comes back from a file."""

import io
from typing import Any

import torch


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    """Return ``saved`` as torch saves and loads it, without anything but plain values and tensors."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
