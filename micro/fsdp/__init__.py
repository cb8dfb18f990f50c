"""The driver for FSDP2 (fully_shard): shards are reduced within a node by FSDP, and between nodes by a reducer.

Read attaching (what the user calls), then attachment and exchange (what happens at the end of a backward). FSDP's own
objects are read in groups alone. After backward: backward_end (when FSDP is done), vectors (a module's gradients as one
vector) and step_guard (no optimizer steps before the replicas agree).

`within` sends FSDP's own reduce-scatter in few bits: with or without an exchange between nodes.
"""

from micro.fsdp.attaching import attach_fsdp
from micro.fsdp.attachment import ShardedAttachment
from micro.fsdp.within import QuantizedReduceScatter, attach_within

__all__ = ["QuantizedReduceScatter", "ShardedAttachment", "attach_fsdp", "attach_within"]
