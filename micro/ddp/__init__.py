"""The driver for DistributedDataParallel: a communication hook that gives DDP's buckets to a reducer.

Read attachment (what the user calls), then hook (what DDP calls), then reduction (what happens to a bucket on the
lane), then states, unused and last_step.
"""

from micro.ddp.attachment import Attachment, attach, detach

__all__ = ["Attachment", "attach", "detach"]
