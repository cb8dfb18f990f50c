"""Batches of text in which words are masked, for the model to predict."""

from collections.abc import Iterator

import torch
from torch import Tensor

from data.seeding import generator
from data.sharding import ShuffledShare, num_parts, shard_of
from data.text_batches import NUM_COLUMNS, check_length, check_tokens

IGNORED_TARGET = -100  # target of words that are not predicted; torch's cross_entropy ignores it
PREDICTED = 0.15  # share of words that are predicted
MASKED = 0.8  # share of these that the input replaces by the mask
RANDOM = 0.1  # share of these that the input replaces by a random word; the rest are unchanged
EVAL_SEED = 15  # not the run's seed: runs that differ in seed are measured on the same masks


class MaskedBatches:
    """One rank's share of a text, in shuffled segments with words to be predicted.

    The text is cut into segments of sequence_length words. In every epoch all ranks shuffle them by (seed, epoch) alike
    and take disjoint shares of equal size; the tail that fills no step, fewer than world_size * batch_size segments, is
    left out of that epoch. In each segment 15 % of the places, rounded but at least one, are drawn from
    (seed, epoch, rank) to be predicted: the mask replaces 80 % of them, a random word 10 %, and 10 % stay as they are.

    Args:
        tokens: (num,) int64 words in the order of the text; not modified.
        num_words: random words are drawn from 0..num_words - 1.
        mask_word: the word that replaces a masked one.
        batch_size: segments per rank and step.
        sequence_length: words of a segment.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        seed: the run's seed.
        device: of the batches; None: the tokens' device.

    Raises:
        ValueError: a setting is out of range, or there are too few words for one step.

    Source: Devlin, Chang, Lee & Toutanova, BERT, NAACL 2019, arXiv 1810.04805, section 3.1; the count per segment is
    that of the authors' create_pretraining_data.py. Differences: segments are cut from the running text, without pairs
    of sentences and their special words, and masks are drawn again in every epoch.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        num_words: int,
        mask_word: int,
        batch_size: int,
        sequence_length: int,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device | str | None = None,
    ) -> None:
        check_tokens(tokens, rank, world_size, batch_size=batch_size, sequence_length=sequence_length)
        _check_words(tokens, num_words, mask_word)
        check_length(tokens, world_size * batch_size * sequence_length, "world_size * batch_size * sequence_length")
        self._segments = _in_segments(tokens, sequence_length)
        self._num_words, self._mask_word = num_words, mask_word
        num = len(self._segments)
        self._share = ShuffledShare(num=num, size=batch_size, rank=rank, world_size=world_size, seed=seed)
        self._device = device or tokens.device

    @property
    def num_batches(self) -> int:
        """Steps in an epoch, equal on all ranks."""
        return self._share.num_steps

    def indices(self, epoch: int) -> Tensor:
        """Return the segments of this rank in an epoch: (num_batches, batch_size) int64 on the CPU."""
        return self._share.in_epoch(epoch)

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (batch_size, sequence_length) int64 inputs, and targets that are -100 where nothing is predicted.

        Args:
            epoch: number of the epoch, from 0.
            start: number of batches to skip; the rest equal those of the whole epoch bit for bit.
        """
        segments = self._segments[self.indices(epoch).flatten()]
        random = generator(self._share.seed, epoch, self._share.rank)
        inputs, targets = _masked(segments, self._num_words, self._mask_word, random)
        shape = (self.num_batches, self._share.size, -1)
        batches = (part.view(shape)[start:].to(self._device) for part in (inputs, targets))
        yield from zip(*batches, strict=True)


class EvalMasked:
    """One rank's share of the test text in order, in segments with words to be predicted.

    Segments and masks are the same in every run and at every world size, and so are sums over the ranks.
    Shares differ by at most one segment, so ranks may have different numbers of batches, even none: sum losses and
    counts over the ranks after the loop, never inside it. Left out are fewer than sequence_length words at the end of
    the text.

    Args:
        tokens: (num,) int64 words in the order of the text; not modified.
        num_words: random words are drawn from 0..num_words - 1.
        mask_word: the word that replaces a masked one.
        batch_size: segments per batch; the last one may have fewer.
        sequence_length: words of a segment.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        device: of the batches; None: the tokens' device.

    Raises:
        ValueError: a setting is out of range, or the text is shorter than one segment.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        num_words: int,
        mask_word: int,
        batch_size: int = NUM_COLUMNS,
        sequence_length: int,
        rank: int,
        world_size: int,
        device: torch.device | str | None = None,
    ) -> None:
        check_tokens(tokens, rank, world_size, batch_size=batch_size, sequence_length=sequence_length)
        _check_words(tokens, num_words, mask_word)
        check_length(tokens, sequence_length, "sequence_length")
        segments = _in_segments(tokens, sequence_length)
        masked = _masked(segments, num_words, mask_word, generator(EVAL_SEED))
        share = shard_of(len(segments), rank, world_size)
        self._inputs, self._targets = (part[share].to(device or tokens.device) for part in masked)
        self._batch_size = batch_size

    @property
    def num_samples(self) -> int:
        """Words that this rank predicts."""
        segments, length = self._targets.shape
        return segments * _num_predicted(length)

    @property
    def num_batches(self) -> int:
        """Batches of this rank; ranks may differ."""
        return num_parts(len(self._inputs), self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (at most batch_size, sequence_length) int64 inputs, and targets, -100 where nothing is predicted."""
        for start in range(0, len(self._inputs), self._batch_size):
            chosen = slice(start, start + self._batch_size)
            yield self._inputs[chosen], self._targets[chosen]


def _masked(segments: Tensor, num_words: int, mask_word: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of (num, length) segments, both (num, length) int64; all on the CPU."""
    order = torch.rand(segments.shape, generator=random).argsort(dim=1, stable=True)
    places = order[:, : _num_predicted(segments.shape[1])]
    chosen = segments.gather(1, places)
    targets = torch.full_like(segments, IGNORED_TARGET).scatter_(1, places, chosen)
    draw = torch.rand(chosen.shape, generator=random)
    words = torch.randint(num_words, chosen.shape, generator=random)
    shown = torch.where(draw < MASKED, mask_word, torch.where(draw < MASKED + RANDOM, words, chosen))
    return segments.scatter(1, places, shown), targets


def _num_predicted(sequence_length: int) -> int:
    return max(1, round(PREDICTED * sequence_length))


def _in_segments(tokens: Tensor, length: int) -> Tensor:
    """Return (num, length) segments on the CPU, where masks are drawn."""
    num = len(tokens) // length
    return tokens[: num * length].view(num, length).cpu()


def _check_words(tokens: Tensor, num_words: int, mask_word: int) -> None:
    if not 0 <= mask_word < num_words:
        raise ValueError(f"mask_word must be in 0..{num_words - 1}, got {mask_word}")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < num_words:
        raise ValueError(f"tokens must be in 0..{num_words - 1}, got {tokens.min()}..{tokens.max()}")
