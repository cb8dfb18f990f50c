"""What the drivers share (micro.ddp, micro.fsdp): buckets, scales of losses, discarded gradients, the lane of a step.

Imports reducers and what lies below them, never a driver. Begin with step: how the buckets of a step are reduced.
"""
