"""What the drivers share (micro.ddp, micro.fsdp): buckets, scales of losses, discarded gradients, the lane of a step.

Imports reducers and what lies below them, never a driver. Begin with bucket_states: what a driver keeps of each bucket.
"""
