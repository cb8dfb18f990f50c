"""What holds while a process starts: seldom a full collection of garbage, and no warnings of torch's C++ code.

Imports make some 400,000 objects (most of them for torch's compiler) and leave hardly any garbage. Python's full
collections among them find nothing, and took a sixth of the processor time of the imports.
"""

import gc
import os

_USUAL = gc.get_threshold()
LOG_LEVEL, _HIDDEN = "TORCH_CPP_LOG_LEVEL", "ERROR"
_SELDOM = 200  # collections of the middle generation before a full one, for 1.4 million new objects


def collect_seldom() -> None:
    """Collect garbage among new objects as usual, among all once where Python would twenty times."""
    gc.set_threshold(*_USUAL[:2], _SELDOM)


def collect_as_usual() -> None:
    """Collect garbage as Python does by itself."""
    gc.set_threshold(*_USUAL)


def hide_warnings_of_torch() -> None:
    """Leave the warnings of torch's C++ code out, before torch is imported: one lost connection has 40 lines of them.

    The ranks that a launcher starts print them, into their logs. A level that the user has set holds for all.
    """
    if LOG_LEVEL not in os.environ:
        os.environ[LOG_LEVEL] = _HIDDEN


def log_level_of_ranks() -> str:
    """Return the level of the ranks that this process starts."""
    return "WARNING" if os.environ.get(LOG_LEVEL, _HIDDEN) == _HIDDEN else os.environ[LOG_LEVEL]
