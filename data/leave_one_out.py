"""The leave-one-out split of users' interactions, and the items that each held-out one is ranked against."""

import torch
from torch import Tensor

from data.negative_sampling import NegativeSampler
from data.source import Interactions

NEGATIVES_SEED = 1708_05031  # not the run's seed: runs that differ in seed are measured on the same items
USERS_AT_ONCE = 1024  # another value gives other negatives: the generator draws for one block of users at a time


def leave_one_out(
    users: Tensor,
    items: Tensor,
    *,
    num_users: int,
    num_items: int,
    num_negatives: int,
    checksums: dict[str, str],
) -> Interactions:
    """Hold out the last item of each user, to be ranked against items that the user never took.

    Args:
        users: (num,) int64, ascending.
        items: (num,) int64, each user's in the order in which it took them, without repetition.
        num_users, num_items: both are numbered from 0.
        num_negatives: items to rank the held-out one against.
        checksums: what was read -> its sha256.
    Raises:
        ValueError: see `tested_users`.
    """
    tested = tested_users(users, num_users=num_users, num_items=num_items, num_negatives=num_negatives)
    last = torch.bincount(users, minlength=num_users).cumsum(0)[tested] - 1
    test_items = torch.full((num_users,), -1)
    test_items[tested] = items[last]
    keys = (users * num_items).add_(items).sort().values  # by user and then by item
    sampler = NegativeSampler(users, keys % num_items, num_users=num_users, num_items=num_items)
    kept = torch.ones(len(keys), dtype=torch.bool)
    kept[torch.searchsorted(keys, tested * num_items + test_items[tested])] = False
    keys = keys[kept]
    return Interactions(
        users=(keys // num_items).int(),
        items=(keys % num_items).int(),
        num_users=num_users,
        num_items=num_items,
        test_items=test_items.int(),
        test_negatives=_negatives(sampler, tested, num_users, num_negatives),
        checksums=checksums,
    )


def tested_users(users: Tensor, *, num_users: int, num_items: int, num_negatives: int) -> Tensor:
    """Return the users that are tested, ascending: they took two items or more, and did not take num_negatives or more.

    Other users' items are all for training.

    Raises:
        ValueError: there are none.
    """
    counts = torch.bincount(users, minlength=num_users)
    several = counts >= 2
    if not several.any():
        raise ValueError("no user has two items: there is none to hold out for the test")
    most = num_items - int(counts[several].min())
    if num_negatives > most:
        raise ValueError(f"num_negatives must be at most {most}, which some user never took, got {num_negatives}")
    return (several & (num_items - counts >= num_negatives)).nonzero().squeeze(1)


def _negatives(sampler: NegativeSampler, tested: Tensor, num_users: int, num_negatives: int) -> Tensor:
    """Return (num_users, num_negatives) int32; the rows of users that are not tested hold -1."""
    random = torch.Generator().manual_seed(NEGATIVES_SEED)
    negatives = torch.full((num_users, num_negatives), -1, dtype=torch.int32)
    for block in tested.split(USERS_AT_ONCE):
        negatives[block] = sampler.draw_distinct(block, num_negatives, random).int()
    return negatives
