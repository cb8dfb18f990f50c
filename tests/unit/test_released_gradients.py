"""What was reduced is let go of: after a backward nothing keeps the vector in which gradients were reduced."""

import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from tests.sharded_models import attached_by
from tests.small_models import TwoHeads

pytestmark = pytest.mark.usefixtures("one_rank")


@dataclass(frozen=True)
class Noting(micro.SparseReducer):
    """Notes the vectors that it reduces, and keeps none alive."""

    seen: list[Any] = field(default_factory=list)

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        self.seen.append(weakref.ref(grad))
        return micro.SparseReducer.reduction(self, state, grad, comm)


@pytest.mark.parametrize(("driver", "scope"), [("ddp", "model"), ("fsdp", "bucket"), ("fsdp", "model")])
@pytest.mark.parametrize("nonfinite", [False, True])
def test_no_vector_outlives_its_backward(driver: str, scope: str, nonfinite: bool) -> None:
    reducer = Noting(micro.TopK(), 0.5, nonfinite="skip")
    model, attachment = attached_by(driver, reducer, TwoHeads(), scope=scope)
    for _ in range(3):
        loss = model(torch.ones(2, 6)).square().sum()
        (loss * torch.inf if nonfinite else loss).backward()
        model.zero_grad(set_to_none=True)
        del loss
    assert len(reducer.seen) >= 3
    assert attachment.skipped == nonfinite
    ends = time.monotonic() + 10
    while any(seen() is not None for seen in reducer.seen) and time.monotonic() < ends:
        time.sleep(0.01)  # the lane's thread may still be returning from its task
    assert not [seen for seen in reducer.seen if seen() is not None]
    attachment.close()
