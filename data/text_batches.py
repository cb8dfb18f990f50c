"""Batches of text, cut so that ranks neither overlap nor wait for each other."""

from collections.abc import Iterator

import torch
from torch import Tensor

from data.seeding import generator
from data.sharding import check_ranks, num_parts, shard_of

NUM_COLUMNS = 32  # columns of the test text, for every world size


class TextBatches:
    """One rank's share of a text; each batch continues where the last one stopped.

    The text is cut into world_size * batch_size columns of equal length, each of them contiguous; a rank has batch_size
    neighbouring ones. Batch i of an epoch continues every column where batch i - 1 stopped, so that a recurrent model
    can carry its state along. Nothing is random: all epochs are equal, and world_size * batch_size alone determines
    the batches that the ranks together have in a step. Left out are fewer than world_size * batch_size words at the
    end of the text, and fewer than sequence_length + 1 at the end of each column.

    Args:
        tokens: (num,) int64 words, int32 tokens or uint8 bytes, in the order of the text; not modified.
        batch_size: columns per rank.
        sequence_length: words per column and batch.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        device: of the batches; None: the tokens' device.

    Raises:
        ValueError: a setting is out of range, or there are too few words for one step.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        batch_size: int,
        sequence_length: int,
        rank: int,
        world_size: int,
        device: torch.device | str | None = None,
    ) -> None:
        check_tokens(tokens, rank, world_size, batch_size=batch_size, sequence_length=sequence_length)
        columns = world_size * batch_size
        check_length(tokens, columns * (sequence_length + 1), "world_size * batch_size * (sequence_length + 1)")
        share = slice(rank * batch_size, (rank + 1) * batch_size)
        self._columns = _in_columns(tokens, columns)[share].to(device or tokens.device)
        self._sequence_length = sequence_length

    @property
    def num_batches(self) -> int:
        """Steps in an epoch, equal on all ranks."""
        return (self._columns.shape[1] - 1) // self._sequence_length

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (batch_size, sequence_length) int64 inputs, and as targets the words one place further on.

        Args:
            epoch: not used: all epochs are equal.
            start: number of batches to skip.
        """
        for batch in range(start, self.num_batches):
            yield _window(self._columns, batch * self._sequence_length, self._sequence_length)


class DrawnWindows:
    """One rank's share of a text, in rows that begin anywhere, for models that carry nothing from batch to batch.

    Where the rows of a step begin is drawn from (seed, epoch) for all ranks at once: together they have the same rows
    at every world size.

    Args:
        tokens: (num,) int64 words, int32 tokens or uint8 bytes, in the order of the text; not modified.
        batch_size: rows per rank.
        sequence_length: words per row.
        num_batches: steps of an epoch.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        seed: the run's seed.
        device: of the batches; None: the tokens' device.

    Raises:
        ValueError: a setting is out of range, or there are too few words for one row.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        batch_size: int,
        sequence_length: int,
        num_batches: int,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "sequence_length": sequence_length, "num_batches": num_batches}
        check_tokens(tokens, rank, world_size, **sizes)
        check_length(tokens, sequence_length + 1, "sequence_length + 1")
        self.num_batches, self._tokens, self._length, self._seed = num_batches, tokens, sequence_length, seed
        self._rows, self._own = world_size * batch_size, slice(rank * batch_size, (rank + 1) * batch_size)
        self._device = device or tokens.device

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (batch_size, sequence_length) int64 inputs, and as targets the words one place further on.

        Args:
            epoch: number of the epoch, from 0.
            start: number of batches to skip.
        """
        last = len(self._tokens) - self._length - 1
        drawn = torch.randint(last + 1, (self.num_batches, self._rows), generator=generator(self._seed, epoch))
        places = torch.arange(self._length + 1)
        for begins in drawn[start:, self._own]:
            words = self._tokens[begins[:, None] + places].to(self._device, torch.int64)
            yield words[:, :-1].contiguous(), words[:, 1:].contiguous()


class EvalColumns:
    """One rank's share of the test text; each batch continues where the last one stopped.

    The text is cut into a fixed number of contiguous columns, of which each rank takes neighbouring ones. The words to
    predict, and the words before them, are the same at every world size, and so are sums over the ranks. Shares
    differ by at most one column, and with more ranks than columns some have none: sum losses and counts over the
    ranks after the loop, never inside it. Left out are fewer than num_columns words at the end of the text; the first
    word of a column is never predicted.

    Args:
        tokens: (num,) int64 words, int32 tokens or uint8 bytes, in the order of the text; not modified.
        num_columns: columns over all ranks.
        sequence_length: words per column and batch; the last batch may be shorter.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        device: of the batches; None: the tokens' device.

    Raises:
        ValueError: a setting is out of range, or there are fewer than two words for each column.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        num_columns: int = NUM_COLUMNS,
        sequence_length: int,
        rank: int,
        world_size: int,
        device: torch.device | str | None = None,
    ) -> None:
        check_tokens(tokens, rank, world_size, num_columns=num_columns, sequence_length=sequence_length)
        check_length(tokens, 2 * num_columns, "2 * num_columns")
        share = shard_of(num_columns, rank, world_size)
        self._columns = _in_columns(tokens, num_columns)[share].to(device or tokens.device)
        self._sequence_length = sequence_length

    @property
    def num_samples(self) -> int:
        """Words that this rank predicts."""
        columns, length = self._columns.shape
        return columns * (length - 1)

    @property
    def num_batches(self) -> int:
        """Batches of this rank: 0 if it has nothing."""
        return num_parts(self._columns.shape[1] - 1, self._sequence_length) if self.num_samples else 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (columns, at most sequence_length) int64 inputs, and as targets the words one place further on."""
        for batch in range(self.num_batches):
            yield _window(self._columns, batch * self._sequence_length, self._sequence_length)


def _in_columns(tokens: Tensor, columns: int) -> Tensor:
    length = len(tokens) // columns
    return tokens[: columns * length].view(columns, length)


def _window(columns: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    stop = min(start + length, columns.shape[1] - 1)
    return _copied(columns[:, start:stop]), _copied(columns[:, start + 1 : stop + 1])


def _copied(words: Tensor) -> Tensor:
    """Return an int64 copy."""
    return words.to(torch.int64, copy=True, memory_format=torch.contiguous_format)


def check_tokens(tokens: Tensor, rank: int, world_size: int, **sizes: int) -> None:
    """Raise ValueError unless the text is a vector of words, every size at least 1, and the rank one of the ranks."""
    if tokens.ndim != 1 or tokens.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise ValueError(f"tokens must be (num,) int64, got {tuple(tokens.shape)} {tokens.dtype}")
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    check_ranks(rank, world_size)


def check_length(tokens: Tensor, needed: int, what: str) -> None:
    """Raise ValueError unless the text has ``needed`` words; ``what`` says what needs them."""
    if len(tokens) < needed:
        raise ValueError(f"{what} must be at most the {len(tokens)} words of the text, got {needed}")
