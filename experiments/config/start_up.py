"""Garbage collection while a process starts.

Imports make some 400,000 objects (most of them for torch's compiler) and leave hardly any garbage. Python's full
collections among them find nothing, and took a sixth of the processor time of the imports.
"""

import gc

_USUAL = gc.get_threshold()
_SELDOM = 200  # collections of the middle generation before a full one, for 1.4 million new objects


def collect_seldom() -> None:
    """Collect garbage among new objects as usual, among all once where Python would twenty times."""
    gc.set_threshold(*_USUAL[:2], _SELDOM)


def collect_as_usual() -> None:
    """Collect garbage as Python does by itself."""
    gc.set_threshold(*_USUAL)
