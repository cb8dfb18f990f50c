"""Batches for training and evaluation, cut so that ranks neither overlap nor wait for each other."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data.augment import AUGMENTATIONS, DRAW_RANGE
from data.seeding import generator
from data.sharding import ShuffledShare, check_ranks, num_parts, shard_of

EPOCH_DRAWS = 3  # random integers per image drawn for a whole epoch at once; further ones are drawn batch by batch


class ShardedBatches:
    """One rank's share of the training set, shuffled again in every epoch.

    All ranks shuffle equally, by (seed, epoch), and take disjoint shares of equal size: together the ranks' batches of
    one step are the next world_size * batch_size samples of the shuffled order, whatever the world size. The tail that
    fills no such step, fewer than world_size * batch_size samples, is left out of that epoch; each epoch leaves out
    others. Augmentation is drawn from (seed, epoch, rank), and from the step where it needs more random numbers.

    Args:
        inputs: (num, channels, height, width) uint8 or float32, in memory, on a device, or a memory-mapped file; kept
            where it is, never modified.
        targets: (num,) int64, on the same device.
        batch_size: samples per rank and step.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        seed: the run's seed.
        augment: one of `data.augment.AUGMENTATIONS`.
        image_size: side of the images in a batch, at most that of the inputs; None keeps their height and width.
        mean: per channel, as in `Classification`.
        std: per channel, as in `Classification`.
        device: of the batches; each is gathered on the inputs' device, moved, then augmented. None: the inputs' device.

    Raises:
        ValueError: a setting is out of range, or there are too few samples for one step.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        augment: str = "none",
        image_size: int | None = None,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | None = None,
    ) -> None:
        _check(inputs, targets, batch_size, rank, world_size)
        if augment not in AUGMENTATIONS:
            raise ValueError(f"augment must be one of {', '.join(AUGMENTATIONS)}, got '{augment}'")
        if len(inputs) < world_size * batch_size:
            raise ValueError(
                f"world_size * batch_size must be at most the {len(inputs)} training samples, "
                f"got {world_size} * {batch_size} = {world_size * batch_size}"
            )
        self._size = _size(inputs, image_size)
        self._inputs, self._targets, self._device = inputs, targets, device or inputs.device
        self._share = ShuffledShare(num=len(inputs), size=batch_size, rank=rank, world_size=world_size, seed=seed)
        self._augment = AUGMENTATIONS[augment]
        self._normalise = _Normalise(inputs, mean, std, self._device)

    @property
    def num_batches(self) -> int:
        """Steps in an epoch, equal on all ranks."""
        return self._share.num_steps

    def indices(self, epoch: int) -> Tensor:
        """Return the samples of this rank in an epoch: (num_batches, batch_size) int64 on the CPU."""
        return self._share.in_epoch(epoch)

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (batch_size, channels, height, width) float32 inputs and (batch_size,) int64 targets.

        Args:
            epoch: number of the epoch, from 0.
            start: number of batches to skip; the rest equal those of the whole epoch bit for bit.
        """
        draws = self._draws(epoch).to(self._device)
        for step, chosen in enumerate(self.indices(epoch)[start:].to(self._inputs.device), start):
            images, targets = self._inputs[chosen].to(self._device), self._targets[chosen].to(self._device)
            drawn = self._with_more(draws[step], epoch, step)
            yield self._normalise(self._augment.apply(images, drawn, self._size)), targets

    def _draws(self, epoch: int) -> Tensor:
        shape = (self.num_batches, self._share.size, EPOCH_DRAWS)
        return torch.randint(DRAW_RANGE, shape, generator=generator(self._share.seed, epoch, self._share.rank))

    def _with_more(self, drawn: Tensor, epoch: int, step: int) -> Tensor:
        """Return the draws of a batch, followed by as many as the augmentation needs beyond them."""
        num_more = self._augment.num_draws - EPOCH_DRAWS
        if num_more <= 0:
            return drawn
        random = generator(self._share.seed, epoch, self._share.rank, step)
        more = torch.randint(DRAW_RANGE, (self._share.size, num_more), generator=random)
        return torch.cat([drawn, more.to(self._device)], dim=1)


class EvalBatches:
    """One rank's share of the test set, in order, without overlap and without a sample left out.

    Shares differ by at most one sample, so ranks may have different numbers of batches, even none: sum over the ranks
    after the loop, never inside it.

    Args:
        inputs: (num, channels, height, width) uint8 or float32; kept where it is, never modified.
        targets: (num,) int64, on the same device.
        batch_size: samples per batch; the last one may be smaller.
        rank: this rank, global over all nodes.
        world_size: number of ranks.
        mean: per channel, as in `Classification`.
        std: per channel, as in `Classification`.
        device: of the batches; None: the inputs' device.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | None = None,
    ) -> None:
        _check(inputs, targets, batch_size, rank, world_size)
        share = shard_of(len(inputs), rank, world_size)
        self._inputs, self._targets, self._batch_size = inputs[share], targets[share], batch_size
        self._device = device or inputs.device
        self._normalise = _Normalise(inputs, mean, std, self._device)

    @property
    def num_samples(self) -> int:
        """Samples of this rank; they sum to the test set over the ranks."""
        return len(self._inputs)

    @property
    def num_batches(self) -> int:
        """Batches of this rank; ranks may differ."""
        return num_parts(self.num_samples, self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (at most batch_size, channels, height, width) float32 inputs and their int64 targets."""
        for start in range(0, self.num_samples, self._batch_size):
            chosen = slice(start, start + self._batch_size)
            images, targets = self._inputs[chosen].to(self._device), self._targets[chosen].to(self._device)
            yield self._normalise(images), targets


class _Normalise:
    """Map pixels to (pixel - mean) / std per channel, in float32; uint8 pixels count as pixel / 255."""

    def __init__(self, inputs: Tensor, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        channels = inputs.shape[1]
        if len(mean) != channels or len(std) != channels:
            raise ValueError(f"mean and std must have {channels} channels as the inputs, got {len(mean)}, {len(std)}")
        if not all(value > 0 for value in std):
            raise ValueError(f"std must be positive, got {tuple(std)}")
        unit = 255.0 if inputs.dtype == torch.uint8 else 1.0
        scales = [1 / (unit * value) for value in std]
        shifts = [-m / s for m, s in zip(mean, std, strict=True)]
        self._scale, self._shift = (
            torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1) for values in (scales, shifts)
        )

    def __call__(self, images: Tensor) -> Tensor:
        return torch.addcmul(self._shift, images, self._scale)


def _size(inputs: Tensor, image_size: int | None) -> tuple[int, int]:
    """Return height and width of the images in a batch."""
    height, width = inputs.shape[2:]
    if image_size is None:
        return height, width
    if not 1 <= image_size <= min(height, width):
        raise ValueError(f"image_size must be in 1..{min(height, width)}, the side of the images, got {image_size}")
    return image_size, image_size


def _check(inputs: Tensor, targets: Tensor, batch_size: int, rank: int, world_size: int) -> None:
    if inputs.ndim != 4 or len(targets) != len(inputs):
        raise ValueError(
            "inputs must be (num, channels, height, width) with as many targets, "
            f"got {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    check_ranks(rank, world_size)
