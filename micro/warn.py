"""Issue warnings that point to the user's line, not into the library."""

import contextlib
import os
import sys
import warnings

import torch

_INSIDE = (*(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__)), contextlib.__file__)


def warn(message: str) -> None:
    """Issue a UserWarning at the innermost stack frame outside micro and torch.

    A thread of autograd or micro has no such frame; the warning then points to the start of the thread.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
