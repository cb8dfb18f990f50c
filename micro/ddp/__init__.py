"""The driver for DistributedDataParallel: a communication hook that gives DDP's buckets to a reducer.

Read attaching (what the user calls), then attachment (what DDP calls through its hook, and when a backward begins and
ends) and backward (what a bucket is, and how it is reduced on the lane). Checkpoints: bucket_order (the same buckets
after a restart).
"""

from micro.ddp.attaching import attach, detach
from micro.ddp.attachment import Attachment

__all__ = ["Attachment", "attach", "detach"]
