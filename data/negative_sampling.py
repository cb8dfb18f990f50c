"""Negative sampling: draw items that a user did not take, without listing them."""

import torch
from torch import Tensor


class NegativeSampler:
    """Draws items that a user did not take: the untaken items, numbered from 0 in ascending order.

    Untaken item n is n plus the number of taken items below it. The k-th taken item, in ascending order, is below it
    when item - k <= n, so one search in a sorted vector finds that number. A uniform number thus gives a uniform
    untaken item: no draw is rejected, and memory is 8 bytes per pair instead of a table of users by items.

    Args:
        users: (num,) users of the taken pairs, ascending.
        items: (num,) their items, ascending and distinct within a user. Not modified.
        num_users, num_items: both are numbered from 0.

    Attributes:
        counts: (num_users,) int64, how many items each user did not take.
    """

    def __init__(self, users: Tensor, items: Tensor, *, num_users: int, num_items: int) -> None:
        taken = torch.bincount(users, minlength=num_users)
        self.counts = num_items - taken
        self._num_items, self._before = num_items, taken.cumsum(0) - taken
        # Ascending, since item - place never falls within a user and never exceeds the number of items left.
        self._keys = (users.long() * num_items).add_(items).add_(self._before[users.long()])
        self._keys -= torch.arange(len(users), device=users.device)

    def item(self, users: Tensor, numbers: Tensor) -> Tensor:
        """Return the untaken items of these numbers, int64.

        Args:
            users: int64, of any shape.
            numbers: int64 in [0, counts[users]), of the same shape.
        """
        sought = (users * self._num_items + numbers).contiguous()
        below = torch.searchsorted(self._keys, sought, right=True) - self._before[users]
        return numbers + below

    def draw(self, users: Tensor, num: int, random: torch.Generator) -> Tensor:
        """Return (len(users), num) int64 untaken items, uniform and with replacement; every user must have one.

        The generator is the CPU's, so that the draws do not depend on the device of the pairs.
        """
        numbers = torch.randint(2**62, (len(users), num), generator=random).to(users.device)
        users = users.unsqueeze(1).expand(-1, num)
        return self.item(users, numbers % self.counts[users])

    def draw_distinct(self, users: Tensor, num: int, random: torch.Generator) -> Tensor:
        """Return (len(users), num) int64 untaken items, all different within a row, every set equally likely.

        Every user must have at least num of them. Source: Floyd's algorithm, in Bentley & Floyd, Programming Pearls:
        A Sample of Brilliance, Communications of the ACM 30(9), 1987; it never draws again, however few items are left.
        """
        numbers = torch.full((num, len(users)), -1)
        top = self.counts[users] - num
        for row in range(num):
            number = torch.randint(2**62, (len(users),), generator=random) % (top + row + 1)
            seen = (numbers[: row + 1] == number).view(torch.uint8).amax(0).bool()  # as any(0), but vectorised
            numbers[row] = torch.where(seen, top + row, number)
        return self.item(users.unsqueeze(1).expand(-1, num), numbers.T)
