"""Garbage collection while a process starts.

Imports make some 400,000 objects (most of them for torch's compiler) and leave hardly any garbage. Python's full
collections among them find nothing, and took a sixth of the processor time of the imports.
"""

import gc

_USUAL = gc.get_threshold()
_NEVER = 1_000_000  # collections of the middle generation before a full one


def skip_full_collections() -> None:
    """Collect garbage among new objects alone, until ``collect_as_usual``."""
    gc.set_threshold(*_USUAL[:2], _NEVER)


def collect_as_usual() -> None:
    """Collect garbage as Python does by itself."""
    gc.set_threshold(*_USUAL)
