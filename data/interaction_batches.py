"""Batches of (user, item) pairs: positive ones, each followed by its negatives."""

from collections.abc import Iterator

import torch
from torch import Tensor

from data.negative_sampling import NegativeSampler
from data.seeding import generator
from data.sharding import ShuffledShare, check_ranks, num_parts, shard_of
from data.source import Interactions


class InteractionBatches:
    """One rank's share of the positive pairs, shuffled again in every epoch, each followed by its negatives.

    All ranks shuffle the positives by (seed, epoch) and take disjoint shares of equal size, so each rank's batch
    holds positives and negatives 1:negatives. Together the ranks' positives of one step are the next ones of the
    shuffled order, whatever the world size; the tail that fills no such step is left out of that epoch. Negatives are
    drawn from (seed, epoch, rank, step), uniformly and with replacement, among the items that the user did not take in
    training. The held-out item may be drawn too, because training must not know it.

    Args:
        content: kept, never modified.
        batch_size: pairs per rank and step, positives and negatives together.
        negatives: negatives per positive.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        seed: the run's seed.
        device: of the batches; None: the device of content.

    Raises:
        ValueError: a setting is out of range, there are too few pairs for one step, or a user took every item.

    Source: He et al., Neural Collaborative Filtering, WWW 2017, arXiv 1708.05031, sections 3.1 and 4.1. Differences
    from public code that joins positives and negatives and cuts the whole into contiguous shares: there the first ranks
    hold all positives.
    """

    def __init__(
        self,
        content: Interactions,
        *,
        batch_size: int,
        negatives: int = 4,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device | str | None = None,
    ) -> None:
        check_ranks(rank, world_size)
        if negatives < 0:
            raise ValueError(f"negatives must be at least 0, got {negatives}")
        positives, rest = divmod(batch_size, negatives + 1)
        if rest or positives < 1:
            fitting = (max(positives, 0) + 1) * (negatives + 1)
            raise ValueError(
                f"batch_size must be a multiple of negatives + 1 = {negatives + 1}, got {batch_size}: take {fitting}"
            )
        if len(content.users) < world_size * positives:
            raise ValueError(
                f"world_size * batch_size must be at most {len(content.users)} positive pairs with {negatives} "
                f"negatives each = {len(content.users) * (negatives + 1)}, got {world_size} * {batch_size}"
            )
        self._users, self._items = content.users.to(device), content.items.to(device)
        sizes = {"num_users": content.num_users, "num_items": content.num_items}
        self._sampler = NegativeSampler(self._users, self._items, **sizes)
        if negatives and not self._sampler.counts.all():
            user = int(self._sampler.counts.argmin())
            raise ValueError(f"every user must leave an item for negatives, user {user} took all {content.num_items}")
        num, self._negatives = len(content.users), negatives
        self._share = ShuffledShare(num=num, size=positives, rank=rank, world_size=world_size, seed=seed)

    @property
    def num_batches(self) -> int:
        """Steps in an epoch, equal on all ranks."""
        return self._share.num_steps

    def indices(self, epoch: int) -> Tensor:
        """Return the positive pairs of this rank in an epoch: (num_batches, positives) int32 on the CPU."""
        return self._share.in_epoch(epoch, torch.int32).clone()  # only this rank's share

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (batch_size,) int64 users, int64 items and float32 labels, 1 for a pair that was taken, else 0.

        Args:
            epoch: number of the epoch, from 0.
            start: number of batches to skip; the rest equal those of the whole epoch bit for bit.
        """
        labels = torch.zeros(self._share.size, self._negatives + 1, device=self._users.device)
        labels[:, 0] = 1
        for step, chosen in enumerate(self.indices(epoch)[start:], start):
            random = generator(self._share.seed, epoch, self._share.rank, step)
            users, items = self._step(chosen.to(self._users.device), random)
            yield users, items, labels.flatten().clone()

    def _step(self, chosen: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        users, taken = self._users[chosen].long(), self._items[chosen].long()
        left = self._sampler.draw(users, self._negatives, random)
        return users.repeat_interleave(self._negatives + 1), torch.cat([taken.unsqueeze(1), left], dim=1).flatten()


class EvalUsers:
    """One rank's share of the users with a held-out item, in order, without overlap and without one left out.

    Shares differ by at most one user, so ranks may have different numbers of batches, even none: sum `ranking_sums`
    over the ranks after the loop, never inside it.

    Args:
        content: kept, never modified.
        batch_size_users: users per batch; the last one may be smaller.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        device: of the batches; None: the device of content.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        content: Interactions,
        *,
        batch_size_users: int,
        rank: int,
        world_size: int,
        device: torch.device | str | None = None,
    ) -> None:
        check_ranks(rank, world_size)
        if batch_size_users < 1:
            raise ValueError(f"batch_size_users must be at least 1, got {batch_size_users}")
        tested = (content.test_items >= 0).nonzero().squeeze(1)
        share = tested[shard_of(len(tested), rank, world_size)]
        ranked = torch.cat([content.test_items[share].unsqueeze(1), content.test_negatives[share]], dim=1)
        self._users, self._items, self._batch_size = share.to(device), ranked.to(device), batch_size_users

    @property
    def num_samples(self) -> int:
        """Users of this rank; over the ranks they sum to the users with a held-out item."""
        return len(self._users)

    @property
    def num_batches(self) -> int:
        """Batches of this rank; ranks may differ."""
        return num_parts(self.num_samples, self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (at most batch_size_users, 1 + num_negatives) int64 users and items, the held-out item first."""
        for start in range(0, self.num_samples, self._batch_size):
            items = self._items[start : start + self._batch_size].long()
            users = self._users[start : start + self._batch_size]
            yield users.unsqueeze(1).repeat(1, items.shape[1]), items


def ranking_sums(scores: Tensor, top: int = 10) -> Tensor:
    """Return the sums that HR and NDCG are computed from; add them up over batches and ranks.

    An item whose score equals that of the held-out one, or is NaN, is ranked before it: a model that gives all items
    one score has no hit where there are at least ``top`` negatives. A held-out item whose score is NaN is a miss.

    Args:
        scores: (users, 1 + num_negatives), the held-out item first. Not modified.
        top: length of the list that the held-out item must be in.
    Returns:
        (3,) float64: users whose held-out item is in the list, the sum of 1 / log2(2 + its place from 0) over these,
        and the number of users. The first two divided by the third are HR@top and NDCG@top.
    Raises:
        ValueError: scores are not of that shape, or top is less than 1.

    Source: He et al., WWW 2017, arXiv 1708.05031, section 4.1.
    """
    if scores.ndim != 2 or scores.shape[1] < 1:
        raise ValueError(f"scores must be (users, 1 + num_negatives), got {tuple(scores.shape)}")
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    held_out = scores[:, :1]
    place = (~(scores[:, 1:] < held_out)).sum(dim=1)  # not >=, which is false for NaN
    hit = ((place < top) & ~held_out.squeeze(1).isnan()).double()
    gain = hit / (place.double() + 2).log2()
    return torch.stack([hit.sum(), gain.sum(), torch.ones_like(hit).sum()])
