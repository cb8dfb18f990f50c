"""Shared by the drivers (micro.ddp, micro.fsdp): states of buckets, loss scaling, checks of gradients, the lane.

Imports reducers and the layers below, never a driver. Begin with step, which reduces the buckets of a step.
"""
