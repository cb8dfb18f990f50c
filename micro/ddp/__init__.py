"""The driver for DistributedDataParallel: a communication hook that gives DDP's buckets to a reducer.

Read attaching (what the user calls), then attachment (what DDP calls through hook), backward (when one begins and
ends), buckets (what a bucket is) and bucket_lane (how it is reduced). Checkpoints: bucket_order (the same buckets after
a restart).
"""

from micro.ddp.attaching import attach, detach
from micro.ddp.attachment import Attachment

__all__ = ["Attachment", "attach", "detach"]
