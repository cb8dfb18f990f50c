"""Interactions drawn from a model of latent factors: data for a recommender without a download."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from data.leave_one_out import leave_one_out
from data.seeding import generator
from data.source import DatasetInfo, Interactions, Source, check_drawn, sha256


@dataclass(frozen=True, kw_only=True)
class Latent(Source):
    """Users who take items one after the other, by taste and by popularity.

    User u wants item i with the score

        strength * dot(p_u, q_i) / sqrt(num_factors) - popularity * log(1 + place_i)

    where p_u and q_i are standard normal vectors of num_factors entries, so that the first term has the standard
    deviation strength, and place_i is the item's place in a random order, from 0: without taste, popularity follows
    Zipf's law with that exponent. A user takes num_taken + 1 items in turn, each from the softmax of the scores over
    the items that are left, drawn as the largest of scores plus Gumbel noise; the last one is held out for the test.

    Attributes:
        num_users, num_items: both are numbered from 0.
        num_taken: items that each user takes for training.
        num_factors: entries of the latent vectors.
        strength: standard deviation of the taste; 0 leaves popularity alone.
        popularity: Zipf's exponent; 0 makes all items equally popular.
        num_negatives: items that a user never took; the held-out item is ranked against them.
        draw: seed of the data. The run's seed does not matter: runs of different seeds learn from the same data.

    Raises:
        ValueError: a setting is out of range, or there are too few items.

    Source of the draw without replacement: Kool et al., Stochastic Beams and Where to Find Them, ICML 2019,
    arXiv 1903.06059, section 2.
    """

    NAME: ClassVar[str] = "latent"
    LEAST: ClassVar[dict[str, int]] = {"draw": 0}

    num_users: int = 600
    num_items: int = 400
    num_taken: int = 20
    num_factors: int = 4
    strength: float = 3.0
    popularity: float = 1.0
    num_negatives: int = 100
    draw: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        scores, vectors = self.num_users * self.num_items, (self.num_users + self.num_items) * self.num_factors
        check_drawn("num_users, num_items and num_factors", scores + vectors)
        needed = self.num_taken + 1 + self.num_negatives
        if needed > self.num_items:
            raise ValueError(
                f"num_items must be at least num_taken + 1 + num_negatives = {needed}, got {self.num_items}"
            )

    def load(self, root: str | None, seed: int) -> Interactions:
        """Draw the items that each user takes; neither argument matters."""
        random = generator(self.draw)
        scores = self._scores(random)
        noise = torch.empty_like(scores).exponential_(generator=random).log_().neg_()  # Gumbel noise
        items = noise.add_(scores).topk(self.num_taken + 1).indices  # in the order in which they are taken
        users = torch.arange(self.num_users).repeat_interleave(self.num_taken + 1)
        return leave_one_out(
            users,
            items.flatten(),
            num_users=self.num_users,
            num_items=self.num_items,
            num_negatives=self.num_negatives,
            checksums={"latent/items": sha256(items)},
        )

    def info(self, root: str | None) -> DatasetInfo:
        """Return the sizes, from the settings."""
        return DatasetInfo(
            kind="interactions",
            sizes={"num_users": self.num_users, "num_items": self.num_items},
            num_train=self.num_users * self.num_taken,
            num_test=self.num_users,
        )

    def scores(self) -> Tensor:
        """Return the scores from which the items were drawn, (num_users, num_items) float64; no model can beat them."""
        return self._scores(generator(self.draw))

    def _scores(self, random: torch.Generator) -> Tensor:
        users, items = (
            torch.randn(num, self.num_factors, generator=random, dtype=torch.float64)
            for num in (self.num_users, self.num_items)
        )
        places = torch.randperm(self.num_items, generator=random)
        taste = self.strength / math.sqrt(self.num_factors) * users @ items.T
        return taste - self.popularity * places.double().log1p()
