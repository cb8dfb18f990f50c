"""The collectives of a selection; most selectors call none."""

import math
from collections.abc import Mapping
from typing import Any

from micro.density.base import target_count
from micro.flat import Layout
from micro.interleaving import DealtBlocks
from micro.kernels.cuts_reference import NUM_BINS
from micro.planning.volumes.calls import COUNT_BYTES, Calls
from micro.selectors.base import Selector, Traits
from micro.selectors.micro_rules.one_message import message_bytes, room_for
from micro.selectors.per_tensor import PerTensor
from micro.selectors.scaled import Scaled
from micro.selectors.scaling import ScalingSelector
from micro.zoo.deft import layer_pieces

_RULES: Mapping[str, Calls] = {
    "agreed": (("gather_rows", COUNT_BYTES * NUM_BINS),),
    "repaired": (("gather_rows", 16),),  # a count and a sum of logarithms, as float64
    "published": (("gather_rows", COUNT_BYTES),),
}
_WITH_SLICES = ("micro", "exdyna")
_KNOWING_COUNTS = ("topk", "leader", "randomk", "everything", "micro", "exdyna")


def calls_of_selector(selector: Selector[Any], density: float, layout: Layout, world_size: int) -> Calls:
    """Return the collectives that choosing from a bucket takes."""
    if isinstance(selector, PerTensor):  # each parameter is a vector of its own
        parameters = [Layout((name,), (shape,)) for name, shape in zip(layout.names, layout.shapes, strict=True)]
        calls = [calls_of_selector(selector.selector, density, alone, world_size) for alone in parameters]
        asked = sum(size for alone in calls for _, size in alone)  # each gathers one row at most: all are one message
        return (("gather_rows", asked),) if asked else ()
    if isinstance(selector, Scaled):
        mean_squares: Calls = (("all_reduce", 8 * len(layout.names)),) if selector.shares_scale else ()  # as float64
        return mean_squares + calls_of_selector(selector.selector, density, layout, world_size)
    if isinstance(selector, ScalingSelector):  # what others send, they send once
        return calls_of_selector(selector.selector, density, layout, world_size)
    takes_all = has_slices(selector) and selector.rule_name != "published"
    if takes_all and target_count(density, layout.numel) == layout.numel:  # all ranks know what all choose
        return ()
    if Traits.SENDS_INDICES in selector.traits:
        return (("gather_rows", COUNT_BYTES * NUM_BINS + _candidate_bytes(selector, density, layout, world_size)),)
    if selector.name == "micro":
        return _RULES[str(selector.rule_name)]
    if selector.name == "exdyna":
        return _RULES["agreed" if selector.rule_name == "repaired" else "published"]
    if selector.name == "deft":
        num_pieces = len(layer_pieces(layout.numels, world_size))
        if selector.rule_name == "repaired":
            return (("all_reduce", 8 * num_pieces),)  # norms, as float64
        return (("broadcast", COUNT_BYTES * (num_pieces + world_size)),)
    return ()


def _candidate_bytes(selector: Selector[Any], density: float, layout: Layout, world_size: int) -> int:
    """Return the bytes of the candidates, where slices differ by chance alone: about sqrt(2 x ln n) at the most."""
    expected, longest = target_count(density, layout.numel) / world_size, _longest_slice(selector, layout, world_size)
    most = expected + math.sqrt(2 * expected * math.log(world_size))
    return message_bytes(room_for(most, getattr(selector, "slack", 0.0), longest), longest)


def _longest_slice(selector: Selector[Any], layout: Layout, world_size: int) -> int:
    block = getattr(selector, "block", None)
    if block is None:
        return -(-layout.numel // world_size)
    return DealtBlocks(layout.numel, world_size, block).longest


def has_slices(selector: Selector[Any]) -> bool:
    """Return whether each rank searches one slice of its own."""
    return selector.name in _WITH_SLICES or (isinstance(selector, ScalingSelector) and has_slices(selector.selector))


def has_ranges(selector: Selector[Any]) -> bool:
    """Return whether each rank searches one range of its own."""
    if isinstance(selector, ScalingSelector):
        return has_ranges(selector.selector)
    return has_slices(selector) and getattr(selector, "block", None) is None


def knows_counts(selector: Selector[Any]) -> bool:
    """Return whether all ranks know every rank's count after the selection."""
    if isinstance(selector, PerTensor | ScalingSelector):
        return knows_counts(selector.selector)
    return selector.name in _KNOWING_COUNTS or (selector.name == "deft" and selector.rule_name == "repaired")
