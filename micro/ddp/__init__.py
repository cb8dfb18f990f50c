"""The driver for DistributedDataParallel: a communication hook that gives DDP's buckets to a reducer.

Read attaching (what the user calls), then attachment and backward (what DDP calls through hook), then bucket and
reduction (what happens to a bucket on the lane), then unused_parameters. Checkpoints: bucket_order (the same buckets
after a restart).
"""

from micro.ddp.attaching import attach, detach
from micro.ddp.attachment import Attachment

__all__ = ["Attachment", "attach", "detach"]
