"""The driver for FSDP2 (fully_shard): FSDP reduces gradients within a node, a reducer averages shards between nodes.

Read attaching (what the user calls), then attachment and exchange (what happens at the end of a backward). Only groups
reads FSDP's internal objects. After backward: backward_end (when FSDP is done), vectors (a module's gradients as one
vector) and step_guard (no optimizer step before the replicas agree).

`within` quantises FSDP's own reduce-scatter, with or without an exchange between nodes.
"""

from micro.fsdp.attaching import attach_fsdp
from micro.fsdp.attachment import ShardedAttachment
from micro.fsdp.within import QuantizedReduceScatter, attach_within

__all__ = ["QuantizedReduceScatter", "ShardedAttachment", "attach_fsdp", "attach_within"]
