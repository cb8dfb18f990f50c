"""What changed between two versions of weights, bit for bit: for copies of a model that follow its training.

    patch = micro.patches.diff(old, new)
    micro.patches.apply_(served, patch)  # from old to new, or an error and nothing changed

A step of fine-tuning changes few weights in bfloat16, because most updates are less than half a unit in their last
place. A serving copy then needs a few percent of a checkpoint's bytes.

Source: the observation, and the use, are of PULSE, 2026, arXiv 2602.03839. Differences: code and format are our own.
"""

from micro.patches.broadcast import broadcast_
from micro.patches.changes import apply_, diff
from micro.patches.patch import Change, Patch, load, save
from micro.patches.weights import digest

__all__ = ["Change", "Patch", "apply_", "broadcast_", "diff", "digest", "load", "save"]
