"""The driver for DistributedDataParallel: a communication hook that gives DDP's buckets to a reducer.

Read attachment (what the user calls), then hook (what DDP calls), then reduction (what happens to a bucket on the
lane), then states, unused and last_step. Checkpoints: saved_state (their form), names (of parameters), bucket_order
(the same buckets after a restart), rank_states (every rank's in one checkpoint).
"""

from micro.ddp.attachment import Attachment, attach, detach
from micro.ddp.rank_states import AllRanks, RankStates

__all__ = ["AllRanks", "Attachment", "RankStates", "attach", "detach"]
