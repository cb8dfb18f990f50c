"""Predict the next word of a text, or the masked ones."""

import math

from torch import Tensor, nn
from torch.nn import functional as F

import data
from data.text_batches import NUM_COLUMNS
from experiments.config.schema import TrainConfig
from experiments.training.tasks.base import Batch, Carry, Task, need_setting, refuse_settings


class LanguageTask(Task):
    """Predict each word from those before it; measured by the perplexity, exp of the mean loss over all words."""

    def batches(self, rank: int) -> data.Batches:
        """Return a rank's columns of the text, window by window."""
        return data.TextBatches(
            self.content.train,
            batch_size=self.config.batch_size,
            sequence_length=self._length,
            rank=rank,
            world_size=self.config.world_size,
            device=self.device,
        )

    @property
    def unused(self) -> tuple[str, ...]:
        """Files of the folder that are not part of the text."""
        return self.content.unused

    @property
    def words_per_batch(self) -> int:
        """Words that a rank's batch trains on."""
        return self.config.batch_size * self._length

    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the cross entropy of the next words; gradients do not flow back into the previous window."""
        words, targets = batch
        logits, state = model(words, carry)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), tuple(part.detach() for part in state)

    def test_sums(self, rank: int, world_size: int) -> Tensor:
        """Return (3,) sums: negative log-likelihood, the bytes of the words where each has some, words."""
        sums, carry = self.zeros(3), None
        columns = data.EvalColumns(
            self.content.test, sequence_length=self._length, rank=rank, world_size=world_size, device=self.device
        )
        for words, targets in columns:
            logits, carry = self.model(words, carry)
            sums[0] += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            sums[-1] += targets.numel()
            if self.content.num_bytes is not None:
                sums[1] += self.content.num_bytes[targets.cpu()].sum().item()  # host sync: only while it is measured
        return sums

    @property
    def _length(self) -> int:
        return need_setting(self.config, "sequence_length")

    @staticmethod
    def measures(sums: Tensor) -> dict[str, float]:
        """Return the mean loss of a word, the perplexity, and the bits for each byte where words are bytes."""
        loss, *num_bytes, num = sums.tolist()
        found = {"test_loss": loss / num, "perplexity": math.exp(min(loss / num, 700.0))}  # e^710 is beyond a float
        return found | ({"bits_per_byte": loss / num_bytes[0] / math.log(2)} if any(num_bytes) else {})

    @staticmethod
    def check(config: TrainConfig) -> None:
        """Raise UserError for a missing length, or settings of other data."""
        need_setting(config, "sequence_length")
        refuse_settings(config, augment="none", negatives=None)

    @staticmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        """Return the number of full windows of a column."""
        return (num_train // (config.world_size * config.batch_size) - 1) // need_setting(config, "sequence_length")

    @staticmethod
    def fewest_test(config: TrainConfig) -> int:
        """Return the words of a sequence, or of the columns that a test text is cut into if these are more."""
        return max(2 * NUM_COLUMNS, need_setting(config, "sequence_length"))


class MaskedTask(LanguageTask):
    """Predict masked words from all others; measured by the perplexity over the masked words.

    Source: Devlin, Chang, Lee & Toutanova, BERT, NAACL 2019, arXiv 1810.04805. Differences: a masked word becomes the
    vocabulary's unknown word, and the loss is that of the masked words alone, without the next-sentence task.
    """

    def batches(self, rank: int) -> data.Batches:
        """Return a rank's segments, newly shuffled and masked in each epoch."""
        return data.MaskedBatches(
            self.content.train.long(),
            num_words=len(self.content.words),
            mask_word=data.UNKNOWN,
            batch_size=self.config.batch_size,
            sequence_length=self._length,
            rank=rank,
            world_size=self.config.world_size,
            seed=self.config.seed,
            device=self.device,
        )

    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the cross entropy of the masked words."""
        words, targets = batch
        return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=data.IGNORED_TARGET), None

    def test_sums(self, rank: int, world_size: int) -> Tensor:
        """Return (2,) sums: negative log-likelihood, masked words."""
        sums = self.zeros(2)
        masked = data.EvalMasked(
            self.content.test.long(),
            num_words=len(self.content.words),
            mask_word=data.UNKNOWN,
            sequence_length=self._length,
            rank=rank,
            world_size=world_size,
            device=self.device,
        )
        for words, targets in masked:
            logits = self.model(words).float().flatten(0, 1)
            sums[0] += F.cross_entropy(logits, targets.flatten(), ignore_index=data.IGNORED_TARGET, reduction="sum")
            sums[1] += (targets != data.IGNORED_TARGET).sum()
        return sums

    @staticmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        """Return the number of full batches of segments of each rank in an epoch."""
        return num_train // need_setting(config, "sequence_length") // (config.world_size * config.batch_size)

    @staticmethod
    def fewest_test(config: TrainConfig) -> int:
        """Return the words of a sequence."""
        return need_setting(config, "sequence_length")
