"""No warnings of torch's C++ code, where a command starts or a rank does."""

import os

LOG_LEVEL, _HIDDEN = "TORCH_CPP_LOG_LEVEL", "ERROR"


def hide_warnings_of_torch() -> None:
    """Leave the warnings of torch's C++ code out, before torch is imported: one lost connection has 40 lines of them.

    The ranks that a launcher starts print them, into their logs. A level that the user has set holds for all.
    """
    if LOG_LEVEL not in os.environ:
        os.environ[LOG_LEVEL] = _HIDDEN


def log_level_of_ranks() -> str:
    """Return the level of the ranks that this process starts."""
    return "WARNING" if os.environ.get(LOG_LEVEL, _HIDDEN) == _HIDDEN else os.environ[LOG_LEVEL]
