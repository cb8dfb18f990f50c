"""The driver for DistributedDataParallel: a communication hook that gives DDP's buckets to a reducer.

Read attachment (what the user calls), then hook (what DDP calls), then reduction (what happens to a bucket on the
lane), then unused_parameters and last_step_stats. Checkpoints: bucket_order (the same buckets after a restart).
"""

from micro.ddp.attachment import Attachment, attach, detach

__all__ = ["Attachment", "attach", "detach"]
