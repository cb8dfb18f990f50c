"""Rank the items that a user may choose next."""

from torch import Tensor, nn
from torch.nn import functional as F

import data
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.training.tasks.base import Batch, Carry, Task, need_setting, refuse_settings

EVAL_USERS = 256


class RankingTask(Task):
    """Separate items that a user took from others; measured by the rank of the held-out item among negatives.

    Source: He, Liao, Zhang, Nie, Hu & Chua, Neural Collaborative Filtering, WWW 2017, arXiv 1708.05031: hit rate and
    NDCG at 10, each user once.
    """

    def batches(self, rank: int) -> data.Batches:
        """Return a rank's share of the positive pairs, each with its sampled negatives."""
        return data.InteractionBatches(
            self.content,
            batch_size=self.config.batch_size,
            negatives=need_setting(self.config, "negatives"),
            rank=rank,
            world_size=self.config.world_size,
            seed=self.config.seed,
            device=self.device,
        )

    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the binary cross entropy of a batch."""
        users, items, labels = batch
        return F.binary_cross_entropy_with_logits(model(users, items).float(), labels), None

    def test_sums(self, rank: int, world_size: int) -> Tensor:
        """Return (3,) sums: hits, discounted gains, users."""
        sums = self.zeros(3)
        users = data.EvalUsers(
            self.content, batch_size_users=EVAL_USERS, rank=rank, world_size=world_size, device=self.device
        )
        for user, items in users:
            scores = self.model(user.flatten(), items.flatten()).float()
            sums += data.ranking_sums(scores.view_as(items))
        return sums

    @staticmethod
    def measures(sums: Tensor) -> dict[str, float]:
        """Return the hit rate and the NDCG at 10."""
        hits, gains, num = sums.tolist()
        return {"hit_rate": hits / num, "ndcg": gains / num}

    @staticmethod
    def check(config: TrainConfig) -> None:
        """Raise UserError for a batch that holds a positive without all its negatives, or settings of other data."""
        size = need_setting(config, "negatives") + 1
        if config.batch_size % size:
            near = max(size, config.batch_size // size * size)
            raise UserError(
                f"batch_size counts each positive with its {size - 1} negatives and must be a multiple of {size}, "
                f"got {config.batch_size}: take {near}"
            )
        refuse_settings(config, augment="none", sequence_length=None)

    @staticmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        """Return the number of full batches of each rank in an epoch."""
        return num_train // (config.world_size * (config.batch_size // (need_setting(config, "negatives") + 1)))
