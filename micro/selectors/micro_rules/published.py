"""MiCRO's published threshold rule: the authors' public code, step for step."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from micro.comm.requests import AllGather, Reduction, known
from micro.predicted_traffic import COUNT_BYTES, Calls
from micro.selectors import scans
from micro.selectors.micro_rules import Search, ThresholdRule
from micro.selectors.threshold import hard_threshold
from micro.values.finite import on_device
from micro.values.sparse import Selection


@dataclass(slots=True)
class PublishedState:
    """The threshold, and how many indices all ranks together sent in the last step."""

    threshold: float | None = None
    last_count: int = 1


class Published(ThresholdRule[PublishedState]):
    """Multiplies the threshold by 1.005, 1.00125 or 0.995 depending on the last count, as in MiCRO's public code.

    Kept: the start at 1 / (2 sqrt k); a middle band that only raises the threshold (its other branch is unreachable),
    which biases the count low; one arbitrary coordinate, number step % size, if nothing passes; a single rank does not
    count, so its threshold only falls. Where the code fails, this continues: k is at least 1, and an empty slice (fewer
    elements than ranks) sends nothing.
    """

    state: ClassVar[type[PublishedState]] = PublishedState

    def search(self, state: PublishedState, search: Search) -> Reduction[Selection]:
        """Select all elements at or above the threshold, or one arbitrary coordinate."""
        k, size = search.step.target_count, search.slice.numel()
        if state.threshold is None:  # the first step, also after a change of buckets
            state.threshold = hard_threshold(k)
        else:
            share = state.last_count / k
            state.threshold *= 1.005 if share > 1.1 else 1.00125 if share > 0.909 else 0.995
        indices, _ = yield from scans.above(search.slice, state.threshold)
        if not indices.numel() and size:
            indices = torch.tensor([search.step.index % size], dtype=torch.int32, device=search.slice.device)
        mine = on_device([indices.numel()], torch.int32, indices.device)
        (rows,) = yield from known((yield AllGather(mine=mine)))
        counts = tuple(rows.view(-1).tolist())
        state.last_count = sum(counts) if search.comm.world_size > 1 else 0
        return Selection(indices + search.spans[search.comm.rank][0], counts=counts, threshold=state.threshold)

    def calls(self, count: int, numel: int) -> Calls:
        """Return the all-gather of counts."""
        return (("gather_rows", COUNT_BYTES),)
