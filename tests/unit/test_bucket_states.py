"""What is kept of each bucket, while DDP makes new buckets of the old ones."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import micro
from micro.drivers.bucket_states import BucketStates
from micro.reducers.base import BucketState

CPU = torch.device("cpu")
NUM_PARAMETERS = 32
NAMES = tuple(f"p{index}" for index in range(NUM_PARAMETERS))
SHAPE = (3, 2)
NUMEL = NUM_PARAMETERS * 6

copied: list[int] = []


class Counting(micro.SparseReducer):
    """Counts the elements of the vectors that it fills."""

    def rebuild(
        self, layout: micro.Layout, old: Sequence[BucketState], dtype: torch.dtype, device: torch.device
    ) -> BucketState:
        copied.append(layout.numel)
        return micro.SparseReducer.rebuild(self, layout, old, dtype, device)


def layout_of(*names: str) -> micro.Layout:
    return micro.Layout(names, (SHAPE,) * len(names))


def states_with_one_bucket() -> BucketStates:
    """Return states whose only bucket holds 0, 1, 2, ... as its residual."""
    parameters = {name: torch.zeros(SHAPE) for name in NAMES}
    states = BucketStates(Counting(micro.TopK(), density=0.1), parameters)
    state = states.of(layout_of(*NAMES), torch.float32, CPU)
    state.step = 7
    state.residual.copy_(torch.arange(NUMEL))
    copied.clear()
    return states


def kept(states: BucketStates) -> dict[str, Tensor]:
    pieces = [(name, piece) for bucket in states.save() for name, piece in bucket["memory"]["residual"].items()]
    assert len({name for name, _ in pieces}) == len(pieces), "a parameter is kept twice"
    return {name: piece.flatten() for name, piece in pieces}


def expected() -> dict[str, Tensor]:
    return dict(zip(NAMES, torch.arange(NUMEL, dtype=torch.float32).split(6), strict=True))


@pytest.mark.parametrize("num_claimed", [1, 31, 32])
def test_new_buckets_copy_what_is_kept_once_and_the_rest_is_still_kept(num_claimed: int) -> None:
    states = states_with_one_bucket()
    for name in reversed(NAMES[:num_claimed]):
        assert states.of(layout_of(name), torch.float32, CPU).step == 7
    assert sum(copied) == 6 * num_claimed
    torch.testing.assert_close(kept(states), expected(), rtol=0, atol=0)
    assert sum(len(residual) for residual in states.residuals()) == NUMEL
    assert {bucket["step"] for bucket in states.save()} == {7}


def test_a_state_that_does_not_fit_leaves_all_as_it_was() -> None:
    states = states_with_one_bucket()
    states.of(layout_of(*NAMES[:3]), torch.float32, CPU)
    saved = [dict(bucket) for bucket in states.save()]
    saved[-1]["method"] = "another"
    with pytest.raises(ValueError, match="another"):
        states.load(saved)
    assert states.step == 7
    torch.testing.assert_close(kept(states), expected(), rtol=0, atol=0)
