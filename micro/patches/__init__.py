"""Send only the changed weights, bit for bit, from a training to serving copies of its model.

    patch = micro.patches.diff(old, new)
    micro.patches.apply_(served, patch)  # from old to new, or an error and nothing changed

A step of fine-tuning changes few weights in bfloat16, because most updates are less than half a unit in the last place.
A patch then has a few percent of a checkpoint's bytes.

Source of the observation and its use: PULSE, 2026, arXiv 2602.03839. Differences: code and format are this project's.
"""

from micro.patches.broadcast import broadcast_
from micro.patches.changes import apply_, diff
from micro.patches.patch import Change, Patch, load, save
from micro.patches.weights import digest

__all__ = ["Change", "Patch", "apply_", "broadcast_", "diff", "digest", "load", "save"]
