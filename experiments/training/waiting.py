"""In which collective this rank waits, as its beats tell it."""

from contextlib import suppress

import torch.distributed as dist

from experiments.launching.watching.beats import Waiting
from micro.pending import pending


def waiting() -> Waiting:
    """Return the collective that this rank waits in, and how many it has begun."""
    num_begun = pending.num_begun + _num_of_ddp()
    found = pending.oldest()
    return Waiting(found[0], found[1], num_begun) if found else Waiting(num_begun=num_begun)


def _num_of_ddp() -> int:
    """Return how many collectives the default group has begun: those that DDP calls itself are among them."""
    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None) if dist.is_initialized() else None
    with suppress(RuntimeError):  # a backend that does not count
        return int(count()) if count else 0
    return 0
