"""The driver for FSDP2 (fully_shard): shards are reduced within a node by FSDP, and between nodes by a reducer.

Read attachment (what the user calls), then groups (what FSDP calls a parameter group) and replicas (what is checked
before training).
"""

from micro.fsdp.attachment import ShardedAttachment, attach_fsdp

__all__ = ["ShardedAttachment", "attach_fsdp"]
