"""The laws of every kind of batches: shares of the ranks, order, seeds, evaluation and refusals."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import data
from data import augment
from data.interaction_batches import EvalUsers, InteractionBatches
from data.latent import Latent
from data.leave_one_out import leave_one_out
from tests.refusals import refused

Batch = tuple[Tensor, ...]

PLAIN: dict[str, Any] = {"mean": (0.0,), "std": (1.0,)}
IMAGES = torch.arange(48 * 64).view(48, 1, 8, 8) / 3072
WORDS = torch.arange(243)
MASKS: dict[str, Any] = {"num_words": 243, "mask_word": 0, "sequence_length": 5}
TAKEN = Latent(num_users=30, num_items=40, num_taken=6, num_negatives=12).load(None, 0)


def unmasked(batch: Batch) -> Tensor:
    inputs, targets = batch
    return torch.where(targets == -100, inputs, targets)


def positives(batch: Batch) -> list[tuple[int, int]]:
    users, items, labels = batch
    return list(zip(users[labels == 1].tolist(), items[labels == 1].tolist(), strict=True))


class Kind(NamedTuple):
    """Batches of training, which of their samples are in one, and how many there are."""

    make: Callable[..., Any]
    samples: Callable[[Batch], list[Any]]
    num: int


def images(augmentation: str) -> Kind:
    def make(**settings: Any) -> data.ShardedBatches:
        return data.ShardedBatches(IMAGES, torch.arange(48), augment=augmentation, **PLAIN, **settings)

    return Kind(make, lambda batch: batch[1].tolist(), 48)


SHUFFLED = {f"images {name}": images(name) for name in augment.AUGMENTATIONS} | {
    "masked": Kind(
        lambda **settings: data.MaskedBatches(WORDS, **MASKS, **settings),
        lambda batch: (unmasked(batch)[:, 0] // 5).tolist(),
        48,
    ),
    "interactions": Kind(
        lambda batch_size, **settings: InteractionBatches(TAKEN, batch_size=5 * batch_size, **settings), positives, 180
    ),
}
TEXT = Kind(
    lambda seed, **settings: data.TextBatches(WORDS, sequence_length=3, **settings),
    lambda batch: batch[0].flatten().tolist(),
    243,
)
DRAWN = Kind(partial(data.DrawnWindows, WORDS, sequence_length=3, num_batches=6), TEXT.samples, 243)
KINDS = SHUFFLED | {"text": TEXT, "drawn": DRAWN}
PER_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
PER_SHUFFLED = pytest.mark.parametrize("kind", SHUFFLED.values(), ids=SHUFFLED)


def ranks(kind: Kind, world_size: int, batch_size: int, seed: int = 0) -> list[Any]:
    return [kind.make(rank=rank, world_size=world_size, batch_size=batch_size, seed=seed) for rank in range(world_size)]


def samples(kind: Kind, world_size: int, batch_size: int, epoch: int = 0, seed: int = 0) -> list[list[list[Any]]]:
    """Return the samples of every batch of every rank."""
    return [[kind.samples(batch) for batch in own.epoch(epoch)] for own in ranks(kind, world_size, batch_size, seed)]


def joined(batches: Any, dim: int = 0) -> Batch:
    return tuple(torch.cat(parts, dim=dim) for parts in zip(*batches, strict=True))


@PER_SHUFFLED
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 8), (3, 2), (7, 1)])
def test_shares_are_disjoint_equal_and_leave_out_the_tail_only(kind: Kind, world_size: int, batch_size: int) -> None:
    steps = kind.num // (world_size * batch_size)
    assert [batches.num_batches for batches in ranks(kind, world_size, batch_size)] == [steps] * world_size
    by_rank = samples(kind, world_size, batch_size)
    assert [[len(batch) for batch in batches] for batches in by_rank] == [[batch_size] * steps] * world_size
    seen = [sample for batches in by_rank for batch in batches for sample in batch]
    assert len(set(seen)) == len(seen)
    assert len({str(samples(kind, 2, 4, *drawn)) for drawn in ((0, 0), (1, 0), (0, 1))}) == 3, "epoch and seed"


@PER_KIND
def test_a_step_draws_the_same_samples_whatever_the_world_size(kind: Kind) -> None:
    of_two, of_six = samples(kind, 2, 6), samples(kind, 6, 2)
    assert len(of_two[0]) == len(of_six[0]) > 1
    for two, six in zip(zip(*of_two, strict=True), zip(*of_six, strict=True), strict=True):
        assert [*itertools.chain(*two)] == [*itertools.chain(*six)]


@PER_KIND
@pytest.mark.parametrize("start", [0, 3, 99])
def test_an_epoch_resumed_in_the_middle_is_the_whole_epoch(kind: Kind, start: int) -> None:
    for whole, resumed in zip(ranks(kind, 2, 4), ranks(kind, 2, 4), strict=True):
        batches = list(whole.epoch(3))[start:]
        assert len(batches) == max(0, whole.num_batches - start)
        for batch, again in zip(batches, resumed.epoch(3, start=start), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))


ONE_USER = leave_one_out(
    torch.zeros(3).long(), torch.arange(3), num_users=1, num_items=5000, num_negatives=1, checksums={}
)
ALIKE: dict[str, Callable[..., Any]] = {
    "augmentation": lambda **settings: data.ShardedBatches(
        IMAGES[:1].expand(48, -1, -1, -1), torch.zeros(48), batch_size=4, augment="crop_flip", **PLAIN, **settings
    ),
    "masks": lambda **settings: data.MaskedBatches(
        torch.ones(400).long(), num_words=9, mask_word=0, batch_size=4, sequence_length=20, **settings
    ),
    "negatives": lambda **settings: InteractionBatches(ONE_USER, batch_size=5, **settings),
    "windows": partial(data.DrawnWindows, WORDS, batch_size=4, sequence_length=3, num_batches=2),
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_what_is_drawn_for_equal_samples_differs_by_rank_epoch_and_seed(make: Callable[..., Any]) -> None:
    def first(rank: int = 0, epoch: int = 0, seed: int = 0) -> Tensor:
        batch = next(make(rank=rank, world_size=2, seed=seed).epoch(epoch))
        return torch.cat([part.flatten() for part in batch])

    assert torch.equal(first(), first())
    assert not any(torch.equal(first(), other) for other in (first(rank=1), first(epoch=1), first(seed=1)))


def test_seeds_and_draws_equal_those_of_earlier_versions() -> None:
    assert (data.mix(0), data.mix(42, 3, 1)) == (8493733112532773764, 12975919080944902856)
    parts = [(1, 2), (2, 1), (1, 2, 0), (12,), (1,), (-1,), (0, 1, 2)]
    assert len({data.mix(*part) for part in parts}) == len(parts)
    batches = images("crop_flip").make(rank=1, world_size=2, batch_size=12, seed=3)
    draws = torch.randint(2**31, (2, 12, 3), generator=data.generator(3, 5, 1))
    for (shown, _), chosen, drawn in zip(batches.epoch(5), batches.indices(5), draws, strict=True):
        assert torch.equal(shown, augment.crop_flip(IMAGES[chosen], drawn, (8, 8)))


@pytest.mark.parametrize(
    ("num", "world_size", "batch_size", "length"), [(103, 1, 4, 5), (100, 3, 2, 4), (64, 8, 1, 7), (21, 2, 5, 1)]
)
def test_the_columns_of_a_text_are_read_on(num: int, world_size: int, batch_size: int, length: int) -> None:
    settings: dict[str, Any] = {"world_size": world_size, "batch_size": batch_size, "sequence_length": length}
    column = num // (world_size * batch_size)
    read = (column - 1) // length * length
    text = torch.arange(num, dtype=torch.uint8)
    by_rank = [list(data.TextBatches(text, rank=rank, **settings).epoch(0)) for rank in range(world_size)]
    inputs, targets = joined([joined(batches, dim=1) for batches in by_rank])
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, torch.arange(num)[: column * world_size * batch_size].view(-1, column)[:, :read])
    assert torch.equal(targets, inputs + 1)


def test_drawn_windows_begin_everywhere_and_are_followed_by_their_targets() -> None:
    text, settings = WORDS.to(torch.uint8), {"rank": 0, "world_size": 1, "seed": 0}
    batches = data.DrawnWindows(text, batch_size=4, sequence_length=3, num_batches=1000, **settings)
    inputs, targets = joined(batches.epoch(0))
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(3))
    assert inputs[:, 0].unique().tolist() == list(range(240))


def test_masks_hide_replace_and_keep_at_their_rates_equally_at_every_position() -> None:
    whole: dict[str, Any] = {"mask_word": 50, "rank": 0, "world_size": 1, "seed": 0}
    text = torch.randint(50, (60_000,), generator=data.generator(1))
    for length in (1, 2, 20, 50):
        batches = data.MaskedBatches(text[:243], num_words=51, batch_size=2, sequence_length=length, **whole)
        for _, targets in batches.epoch(0):
            assert ((targets != -100).sum(dim=1) == max(1, round(0.15 * length))).all()
    batches = data.MaskedBatches(text, num_words=51, batch_size=100, sequence_length=20, **whole)
    inputs, targets = joined(batches.epoch(0))
    asked = targets != -100
    shown, right = inputs[asked], targets[asked]
    assert len(right) == 9000
    assert (shown == 50).double().mean() == pytest.approx(0.8 + 0.1 / 51, abs=0.02)
    assert (shown == right).double().mean() == pytest.approx(0.1 + 0.1 / 51, abs=0.02)
    assert shown[(shown != 50) & (shown != right)].unique().tolist() == list(range(50))
    assert torch.allclose(asked.double().mean(dim=0), torch.tensor(0.15).double(), atol=0.035)


@pytest.mark.parametrize("negatives", [0, 1, 4])
def test_each_positive_is_followed_by_items_that_its_user_never_took(negatives: int) -> None:
    taken = set(zip(TAKEN.users.tolist(), TAKEN.items.tolist(), strict=True))
    size = 4 * (negatives + 1)
    batches = InteractionBatches(TAKEN, batch_size=size, negatives=negatives, rank=1, world_size=2, seed=0)
    for users, items, labels in batches.epoch(0):
        assert (len(users), users.dtype, items.dtype, labels.dtype) == (size, torch.int64, torch.int64, torch.float32)
        assert (users.view(4, -1) == users.view(4, -1)[:, :1]).all()
        assert (labels.view(4, -1).sum(dim=1) == 1).all()
        pairs = zip(users.tolist(), items.tolist(), strict=True)
        assert [pair in taken for pair in pairs] == (labels == 1).tolist()


class Evaluation(NamedTuple):
    """Batches of a test set, their whole content, and the dimension along which a rank's batches continue."""

    make: Callable[..., Any]
    shown: Callable[[Batch], Tensor]
    expected: Tensor
    num_samples: int
    dim: int = 0


COLUMNS = torch.arange(992).view(32, 31)
TESTED = torch.tensor([user for user in range(30) if user % 4])
TAKEN.test_items[::4] = -1
EVALUATIONS = {
    "images": Evaluation(
        lambda **place: data.EvalBatches(IMAGES, torch.arange(48), batch_size=5, **PLAIN, **place),
        lambda batch: batch[1],
        torch.arange(48),
        48,
    ),
    "columns": Evaluation(
        lambda **place: data.EvalColumns(torch.arange(1000), num_columns=32, sequence_length=7, **place),
        torch.stack,
        torch.stack([COLUMNS[:, :-1], COLUMNS[:, 1:]]),
        960,
        dim=1,
    ),
    "masked": Evaluation(
        lambda **place: data.EvalMasked(WORDS, batch_size=4, **MASKS, **place), unmasked, WORDS[:240].view(48, 5), 48
    ),
    "users": Evaluation(
        lambda **place: EvalUsers(TAKEN, batch_size_users=4, **place),
        lambda batch: torch.cat([batch[0][:, :1], batch[1]], dim=1),
        torch.cat([TESTED[:, None], TAKEN.test_items[TESTED][:, None], TAKEN.test_negatives[TESTED]], dim=1),
        22,
    ),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 50])
@pytest.mark.parametrize("kind", EVALUATIONS.values(), ids=EVALUATIONS)
def test_the_ranks_measure_everything_once_and_equally_at_every_world_size(kind: Evaluation, world_size: int) -> None:
    by_rank = [kind.make(rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [list(rank) for rank in by_rank]
    assert [len(listed) for listed in batches] == [rank.num_batches for rank in by_rank]
    shares = [rank.num_samples for rank in by_rank]
    assert sum(shares) == kind.num_samples
    together = joined([joined(listed, kind.dim) for listed in batches if listed])
    alone = joined(kind.make(rank=0, world_size=1), kind.dim)
    assert torch.equal(kind.shown(together), kind.expected)
    assert max(shares) - min(shares) <= kind.num_samples // len(together[0])
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


SHARDED = partial(data.ShardedBatches, IMAGES[:10], torch.arange(10), batch_size=2, seed=0, **PLAIN)
READ = partial(data.TextBatches, torch.arange(100), batch_size=2, sequence_length=5)
MASKED = partial(data.MaskedBatches, torch.arange(100), batch_size=2, seed=0, **MASKS)
PAIRS = partial(InteractionBatches, TAKEN, batch_size=10, seed=0)


@pytest.mark.parametrize(
    ("make", "key", "value", "part"),
    [
        (SHARDED, "batch_size", 6, "world_size * batch_size must be at most the 10 training samples, got 2 * 6"),
        (SHARDED, "batch_size", 0, "at least 1, got 0"),
        (SHARDED, "augment", "mixup", "one of none, crop_flip"),
        (SHARDED, "image_size", 9, "1..8, the side of the images, got 9"),
        (READ, "batch_size", 0, "at least 1, got 0"),
        (READ, "sequence_length", 25, "at most the 100 words of the text, got 104"),
        (
            partial(data.DrawnWindows, torch.arange(9), batch_size=2, num_batches=2, seed=0),
            "sequence_length",
            9,
            "9 words",
        ),
        (MASKED, "sequence_length", 26, "at most the 100 words of the text, got 104"),
        (partial(data.EvalColumns, torch.arange(100), sequence_length=5), "num_columns", 51, "100 words"),
        (partial(data.EvalMasked, torch.arange(100), batch_size=2, **MASKS), "sequence_length", 101, "100 words"),
        (PAIRS, "batch_size", 12, "a multiple of negatives + 1 = 5, got 12: take 15"),
        (PAIRS, "batch_size", -5, "got -5: take 5"),
        (PAIRS, "negatives", -1, "at least 0, got -1"),
        (PAIRS, "batch_size", 455, "at most 180"),
        (partial(EvalUsers, TAKEN), "batch_size_users", 0, "at least 1, got 0"),
    ],
)
def test_a_setting_out_of_range_is_refused(make: Callable[..., Any], key: str, value: Any, part: str) -> None:
    refused(lambda: make(rank=0, world_size=2, **{key: value}), key, part)
