"""What every data set and every batch promises."""

import gzip
import math
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import data
from data import augment, pickles

PLAIN: dict[str, Any] = {"mean": (0.0,), "std": (1.0,)}
MISTAKES = [
    ("cifar", {}, r"dataset must be one of cifar10, .*synthetic.*, got 'cifar'; did you mean 'cifar10'\?"),
    ("digits", {"size": 8}, r"dataset 'digits' has no settings, got 'size'"),
    ("synthetic", {"size": 8}, r"allows only num_samples, image_size, channels, num_classes, got 'size'"),
    ("synthetic", {"num_samples": 0}, r"num_samples must be an integer of at least 1, got 0"),
    ("cifar10", {}, r"dataset cifar10 needs a data root, got None"),
    ("cifar10", {"num_train": 0}, r"num_train of cifar10 must be a whole number of at least 1, got 0"),
    ("cifar100", {"num_test": 0}, r"num_test of cifar100 must be a whole number of at least 1, got 0"),
    ("imagenet", {}, r"dataset imagenet needs a data root, got None"),
    ("imagenet", {"image_size": 0}, r"image_size of imagenet must be a whole number of at least 1, got 0"),
]


def numbered(num: int) -> tuple[Tensor, Tensor]:
    """Images and targets that both carry the number of their sample."""
    targets = torch.arange(num)
    return targets.float().view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous(), targets


def shards(num: int, world_size: int, batch_size: int, epoch: int = 0, seed: int = 0) -> list[list[list[int]]]:
    """The sample numbers of every batch of every rank."""
    inputs, targets = numbered(num)
    settings = {"batch_size": batch_size, "world_size": world_size, "seed": seed, **PLAIN}
    ranks = [data.ShardedBatches(inputs, targets, rank=rank, **settings) for rank in range(world_size)]
    return [[chosen.tolist() for _, chosen in batches.epoch(epoch)] for batches in ranks]


# Seeds


def test_a_seed_is_the_same_in_every_version() -> None:
    assert data.mix(0) == 8493733112532773764
    assert data.mix(42, 3, 1) == 12975919080944902856


def test_a_seed_tells_order_and_length_apart() -> None:
    parts = [(1, 2), (2, 1), (1, 2, 0), (12,), (1,), (-1,), (0, 1, 2)]
    assert len({data.mix(*part) for part in parts}) == len(parts)
    assert torch.equal(torch.rand(9, generator=data.generator(1, 2)), torch.rand(9, generator=data.generator(1, 2)))


# Training batches


@pytest.mark.parametrize(("num", "world_size", "batch_size"), [(24, 4, 3), (25, 3, 2), (7, 7, 1), (50, 1, 8)])
def test_shards_are_disjoint_equal_and_leave_out_the_tail_only(num: int, world_size: int, batch_size: int) -> None:
    by_rank = shards(num, world_size, batch_size)
    num_batches = num // (world_size * batch_size)
    assert [len(batches) for batches in by_rank] == [num_batches] * world_size
    assert all(len(batch) == batch_size for batches in by_rank for batch in batches)
    seen = [sample for batches in by_rank for batch in batches for sample in batch]
    assert len(seen) == len(set(seen)) == num_batches * world_size * batch_size
    assert set(seen) <= set(range(num))


def test_a_step_draws_the_same_samples_whatever_the_world_size() -> None:
    of_two, of_six = shards(48, 2, 6), shards(48, 6, 2)
    for step in range(4):
        assert [n for rank in of_two for n in rank[step]] == [n for rank in of_six for n in rank[step]]


def test_an_epoch_follows_seed_and_number() -> None:
    assert shards(40, 2, 4, epoch=1) == shards(40, 2, 4, epoch=1)
    assert shards(40, 2, 4, epoch=1) != shards(40, 2, 4, epoch=2)
    assert shards(40, 2, 4, seed=1) != shards(40, 2, 4, seed=2)


def test_every_sample_is_seen_within_a_few_epochs_despite_the_tail() -> None:
    seen = {sample for epoch in range(20) for rank in shards(11, 2, 4, epoch) for batch in rank for sample in batch}
    assert seen == set(range(11))


def test_inputs_stay_with_their_targets() -> None:
    inputs, targets = numbered(30)
    batches = data.ShardedBatches(inputs, targets, batch_size=5, rank=1, world_size=2, seed=0, mean=(3.0,), std=(2.0,))
    for images, chosen in batches.epoch(0):
        assert torch.allclose(images, ((chosen - 3.0) / 2.0).view(-1, 1, 1, 1).expand(-1, 1, 2, 2))


@pytest.mark.parametrize("augmentation", list(augment.AUGMENTATIONS))
def test_an_epoch_resumed_in_the_middle_is_the_whole_epoch(augmentation: str) -> None:
    loaded = _load("synthetic", num_samples=40, channels=2)
    batches = _batches(loaded, augment=augmentation)
    whole, rest = list(batches.epoch(3)), list(batches.epoch(3, start=2))
    assert len(whole) == batches.num_batches == 5
    assert len(rest) == 3
    for (inputs, targets), (again, targets_again) in zip(whole[2:], rest, strict=True):
        assert torch.equal(inputs, again)
        assert torch.equal(targets, targets_again)


def test_augmentation_differs_between_ranks_and_epochs_but_not_between_runs() -> None:
    images, targets = torch.rand(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)

    def first(rank: int, epoch: int) -> Tensor:
        settings = {"batch_size": 4, "world_size": 2, "seed": 0, "augment": "crop_flip", **PLAIN}
        batches = data.ShardedBatches(images[:1].expand(8, -1, -1, -1), targets, rank=rank, **settings)
        return next(iter(batches.epoch(epoch)))[0]

    assert torch.equal(first(0, 0), first(0, 0))
    assert not torch.equal(first(0, 0), first(1, 0))
    assert not torch.equal(first(0, 0), first(0, 1))


def test_crop_flip_equals_one_image_at_a_time() -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (64, 3, 6, 5), dtype=torch.uint8, generator=random)
    draws = torch.randint(2**31, (64, 3), generator=random)
    cropped = augment.crop_flip(images, draws, (6, 5))
    assert cropped.dtype == torch.uint8
    for image, (top, left, mirror), got in zip(images, draws.tolist(), cropped, strict=True):
        padded = torch.zeros(3, 14, 13, dtype=torch.uint8)
        padded[:, 4:10, 4:9] = image
        expected = padded[:, top % 9 : top % 9 + 6, left % 9 : left % 9 + 5]
        assert torch.equal(got, expected.flip(2) if mirror % 2 else expected)


def test_crop_flip_uses_every_offset_and_mirrors_half() -> None:
    draws = torch.randint(2**31, (4000, 3), generator=data.generator(0))
    corner = torch.zeros(4000, 1, 9, 9, dtype=torch.uint8)
    corner[:, :, 4, 4] = 1  # the centre, whose place tells the offset
    rows, columns = augment.crop_flip(corner, draws, (9, 9))[:, 0].nonzero()[:, 1:].unbind(1)
    assert set(rows.tolist()) == set(columns.tolist()) == set(range(9))
    stripe = torch.zeros(4000, 1, 40, 40, dtype=torch.uint8)
    stripe[..., :10] = 1  # wide enough to cover column 4 under every offset, or column -5 when mirrored
    mirrored = augment.crop_flip(stripe, draws, (40, 40))[:, 0, 20, -5].count_nonzero().item()
    assert 0.47 < mirrored / 4000 < 0.53


def test_the_bits_of_crop_flip_are_those_of_earlier_versions() -> None:
    images = torch.arange(8 * 36, dtype=torch.float32).view(8, 1, 6, 6)
    settings = {"batch_size": 2, "rank": 1, "world_size": 2, "seed": 3, "augment": "crop_flip", **PLAIN}
    batches = data.ShardedBatches(images, torch.arange(8), **settings)
    for (got, targets), chosen, draws in zip(batches.epoch(5), batches.indices(5), _earlier_draws(), strict=True):
        assert targets.tolist() == chosen.tolist()
        assert torch.equal(got, augment.crop_flip(images[chosen], draws, (6, 6)))


def _earlier_draws() -> Tensor:
    return torch.randint(2**31, (2, 2, 3), generator=data.generator(3, 5, 1))


@pytest.mark.parametrize("size", [(7, 7), (5, 8)])
def test_rotation_equals_one_pixel_at_a_time(size: tuple[int, int]) -> None:
    height, width = size
    images = torch.randint(1, 256, (6, 2, height, width), dtype=torch.uint8)
    draws = torch.randint(2**31, (6, 4), generator=data.generator(0))
    got = augment.crop_flip_rotate(images, draws, size)
    assert got.dtype == torch.uint8
    for crop, draw, turned in zip(augment.crop_flip(images, draws, size), draws[:, 3].tolist(), got, strict=True):
        angle = math.radians(15 * (2 * draw / 2**31 - 1))
        for row in range(height):
            for column in range(width):
                y, x = row - (height - 1) / 2, column - (width - 1) / 2
                from_row = y * math.cos(angle) + x * math.sin(angle) + (height - 1) / 2
                from_column = x * math.cos(angle) - y * math.sin(angle) + (width - 1) / 2
                if max(abs(from_row % 1 - 0.5), abs(from_column % 1 - 0.5)) < 1e-4:
                    continue  # two pixels are equally near
                near = round(from_row), round(from_column)
                inside = 0 <= near[0] < height and 0 <= near[1] < width
                expected = crop[:, near[0], near[1]] if inside else torch.zeros(2, dtype=torch.uint8)
                assert torch.equal(turned[:, row, column], expected)


def test_rotation_by_nothing_is_crop_flip() -> None:
    images = torch.rand(5, 3, 8, 8)
    draws = torch.randint(2**31, (5, 4), generator=data.generator(1))
    draws[:, 3] = 2**30  # the middle of the range
    assert torch.equal(augment.crop_flip_rotate(images, draws, (8, 8)), augment.crop_flip(images, draws, (8, 8)))


def test_resized_crop_equals_one_image_at_a_time() -> None:
    images = torch.randint(256, (40, 2, 20, 24), dtype=torch.uint8)
    draws = torch.randint(2**31, (40, 23), generator=data.generator(2))
    got = augment.resized_crop(images, draws, (9, 11))
    assert got.dtype == torch.float32
    for image, draw, crop in zip(images, draws.tolist(), got, strict=True):
        top, left, height, width = _rectangle(draw, 20, 24)
        part = image[None, :, top : top + height, left : left + width].float()
        expected = F.interpolate(part, (9, 11), mode="bilinear", align_corners=False)[0]
        assert torch.allclose(crop, expected.flip(2) if draw[2] % 2 else expected, atol=2e-3)


def _rectangle(draw: list[int], rows: int, columns: int) -> tuple[int, int, int, int]:
    for area_draw, aspect_draw in zip(draw[3:13], draw[13:], strict=True):
        area = rows * columns * (0.08 + 0.92 * area_draw / 2**31)
        aspect = math.exp(math.log(3 / 4) + aspect_draw / 2**31 * math.log(16 / 9))
        height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < height <= rows and 0 < width <= columns:
            break
    else:
        height = width = min(rows, columns)
    return draw[0] % (rows - height + 1), draw[1] % (columns - width + 1), height, width


def test_resized_crop_covers_every_size_and_falls_back_to_the_largest_square() -> None:
    draws = torch.randint(2**31, (4000, 23), generator=data.generator(3))
    top, left, height, width = augment._rectangles(draws, 100, 100)
    assert min(top.min(), left.min()) >= 0
    assert max((top + height).max(), (left + width).max()) <= 100
    share, aspect = height * width / 100**2, width / height
    assert 0.075 < share.min() < 0.1
    assert share.max() > 0.98
    assert (aspect.min() > 0.7) & (aspect.max() < 1.42)
    draws[:, 3:13], draws[:, 13:] = 2**31 - 1, 2**31 - 1  # the whole area at an aspect of 4 / 3 fits into no square
    assert augment._rectangles(draws[:1], 100, 100)[2:] == (100, 100)


@pytest.mark.parametrize("augmentation", list(augment.AUGMENTATIONS))
def test_images_come_out_at_the_size_asked_for(augmentation: str) -> None:
    settings = {"batch_size": 4, "rank": 0, "world_size": 1, "seed": 0, "augment": augmentation, **PLAIN}
    images = torch.ones(8, 1, 9, 9, dtype=torch.uint8)
    batches = data.ShardedBatches(images, torch.zeros(8), image_size=6, **settings)
    shown = torch.cat([inputs for inputs, _ in batches.epoch(0)])
    assert shown.shape == (8, 1, 6, 6)
    assert shown.max() == pytest.approx(1 / 255)  # of the same units as the images
    with pytest.raises(ValueError, match=r"image_size must be in 1\.\.9, the side of the images, got 10"):
        data.ShardedBatches(images, torch.zeros(8), image_size=10, **settings)


def test_the_middle_of_larger_images_is_shown() -> None:
    images = torch.arange(2 * 25).view(2, 1, 5, 5)
    assert torch.equal(augment.centre(images, (3, 3)), images[:, :, 1:4, 1:4])
    assert augment.centre(images, (5, 5)).data_ptr() == images.data_ptr()


def test_batches_go_to_the_device_asked_for() -> None:
    images, targets = torch.rand(6, 1, 4, 4), torch.arange(6)
    settings: dict[str, Any] = {"batch_size": 3, "rank": 0, "world_size": 1, **PLAIN}
    meta = torch.device("meta")  # stands in for an accelerator: it has shapes only
    train = data.ShardedBatches(images, targets, seed=0, device=meta, **settings)
    test = data.EvalBatches(images, targets, device=meta, **settings)
    assert {tensor.device for batch in [*train.epoch(0), *test] for tensor in batch} == {meta}
    there = data.EvalBatches(images, targets, device=torch.device("cpu"), **settings)
    assert all(chosen.data_ptr() == targets[3 * i :].data_ptr() for i, (_, chosen) in enumerate(there))


def test_uint8_counts_as_a_fraction_of_255() -> None:
    images = torch.randint(256, (12, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    batches = data.EvalBatches(images, torch.zeros(12), batch_size=12, rank=0, world_size=1, mean=mean, std=std)
    got = next(iter(batches))[0]
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected.float())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 6}, r"world_size \* batch_size must be at most the 10 training samples, got 2 \* 6 = 12"),
        ({"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        ({"rank": 2}, r"rank must be in 0\.\.1, got 2"),
        ({"world_size": 0}, r"world_size must be at least 1, got 0"),
        ({"augment": "mixup"}, r"augment must be one of none, crop_flip, .*, got 'mixup'"),
        ({"mean": (0.0, 0.0)}, r"mean and std must have 1 channels as the inputs, got 2, 1"),
        ({"std": (0.0,)}, r"std must be positive, got \(0\.0,\)"),
    ],
)
def test_a_batch_setting_out_of_range_is_told_in_one_line(settings: dict[str, Any], message: str) -> None:
    inputs, targets = numbered(10)
    valid: dict[str, Any] = {"batch_size": 2, "rank": 0, "world_size": 2, "seed": 0, **PLAIN}
    with pytest.raises(ValueError, match=message):
        data.ShardedBatches(inputs, targets, **(valid | settings))


def test_targets_are_as_many_as_inputs() -> None:
    inputs, targets = numbered(10)
    with pytest.raises(ValueError, match=r"as many targets, got \(10, 1, 2, 2\) and \(9,\)"):
        data.EvalBatches(inputs, targets[:9], batch_size=2, rank=0, world_size=1, **PLAIN)


# Evaluation batches


@pytest.mark.parametrize(("num", "world_size"), [(10, 1), (10, 3), (11, 5), (3, 7), (0, 3), (360, 16)])
def test_eval_shares_hold_every_sample_once(num: int, world_size: int) -> None:
    inputs, targets = numbered(num)
    ranks = [
        data.EvalBatches(inputs, targets, batch_size=2, rank=rank, world_size=world_size, **PLAIN)
        for rank in range(world_size)
    ]
    seen = [sample for batches in ranks for _, chosen in batches for sample in chosen.tolist()]
    assert seen == list(range(num))
    assert [len(list(batches)) for batches in ranks] == [batches.num_batches for batches in ranks]
    counts = [batches.num_samples for batches in ranks]
    assert sum(counts) == num
    assert max(counts) - min(counts) <= 1


# Names and settings


@pytest.mark.parametrize(("name", "settings", "message"), MISTAKES)
def test_a_mistake_is_told_in_one_line_by_each_entry(name: str, settings: dict[str, Any], message: str) -> None:
    for entry in (data.load, data.check, data.info):
        with pytest.raises(ValueError, match=message) as raised:
            entry(name, **settings)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_info_tells_what_load_reads(name: str) -> None:
    data.check(name)
    _assert_consistent(_load(name), data.info(name))


# Digits


def test_digits_split_is_fixed_stratified_and_complete() -> None:
    loaded = _load("digits", seed=1)
    assert (len(loaded.train_inputs), len(loaded.test_inputs)) == (1437, 360)
    assert loaded.train_inputs.min() == 0
    assert loaded.train_inputs.max() == 1
    train, test = loaded.train_targets.bincount(), loaded.test_targets.bincount()
    assert ((train + test) * 360 / 1797 - test).abs().max() <= 1
    # The images of both parts together are those of scikit-learn: nothing twice, nothing lost.
    from sklearn.datasets import load_digits

    both = torch.cat([loaded.train_inputs, loaded.test_inputs]).flatten(1).mul(16).long().tolist()
    assert sorted(both) == sorted(load_digits().data.astype(int).tolist())
    again = _load("digits", seed=2)
    assert torch.equal(loaded.test_inputs, again.test_inputs)
    assert loaded.checksums == again.checksums


def test_digits_are_normalised_by_their_mean_and_std() -> None:
    loaded = _load("digits")
    images = torch.cat([inputs for inputs, _ in _batches(loaded, batch_size=479, world_size=1).epoch(0)])
    assert images.mean().abs() < 1e-5
    assert images.std(correction=0) == pytest.approx(1, abs=1e-5)


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match="dataset digits needs scikit-learn: pip install scikit-learn"):
        data.check("digits")


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"1,2,3\n"), gzip.compress(b"1,2\n")[:-9]],
    ids=["no gzip", "a short row", "cut off"],  # a compressed file has the time in its header: no name for a test
)
def test_a_damaged_file_of_digits_says_what_to_install(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sklearn/datasets/data").mkdir(parents=True)
    (tmp_path / "sklearn/__init__.py").touch()
    (tmp_path / "sklearn/datasets/data/digits.csv.gz").write_bytes(content)
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"digits.* install scikit-learn again"):
        data.check("digits")


# Synthetic


def test_synthetic_follows_seed_and_settings() -> None:
    settings: dict[str, Any] = {"num_samples": 50, "image_size": 4, "channels": 2, "num_classes": 3}
    first, again, other = (_load("synthetic", seed=seed, **settings) for seed in (5, 5, 6))
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert first.checksums == again.checksums != other.checksums
    assert first.train_inputs.shape == (50, 2, 4, 4)
    assert first.test_inputs.shape == (10, 2, 4, 4)
    assert first.train_targets.bincount().tolist() == [17, 17, 16]
    assert not torch.equal(first.train_inputs[:10], first.test_inputs)


def test_synthetic_classes_can_be_told_apart() -> None:
    loaded = _load("synthetic")
    flat = loaded.train_inputs.flatten(1)
    centres = torch.stack([flat[loaded.train_targets == label].mean(0) for label in range(10)])
    nearest = torch.cdist(loaded.test_inputs.flatten(1), centres).argmin(1)
    assert (nearest == loaded.test_targets).float().mean() > 0.95


# CIFAR-10, from files that the test writes


BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar_entry(first: int, num: int = 4) -> dict[str, Any]:
    rows = np.random.default_rng(first).integers(0, 256, (num, 3072), dtype=np.uint8)
    return {"data": rows, "labels": [(first + i) % 10 for i in range(num)]}


def python2_pickle(entry: dict[str, Any]) -> bytes:
    """An entry as Python 2 wrote the official files: byte-string keys and raw bytes, numpy 1's module names."""

    def string(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value  # BINSTRING

    rows = entry["data"]
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + string(b"b") + b"tR"
    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + b"K\x00K\x01tR(K\x03" + string(b"|") + b"NNN"
    dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01(" + b"".join(b"M" + size.to_bytes(2, "little") for size in rows.shape) + b"t" + dtype
    state += b"\x89" + string(rows.tobytes()) + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in entry["labels"]) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + state + string(b"labels") + labels + b"u."


def write_cifar(root: Path, protocol: int = 2, key: Any = str) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for first, name in enumerate(BATCHES):
        entry = {key(name): value for name, value in cifar_entry(first).items()}
        (folder / name).write_bytes(pickle.dumps(entry, protocol=protocol))
    return folder


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("key", [str, str.encode])
def test_cifar_is_read_from_the_official_layout(tmp_path: Path, protocol: int, key: Any) -> None:
    write_cifar(tmp_path, protocol, key)
    loaded = _load("cifar10", root=str(tmp_path), seed=0)
    _assert_consistent(loaded, data.info("cifar10", str(tmp_path)))
    entries = [cifar_entry(first) for first in range(6)]
    train = np.concatenate([entry["data"] for entry in entries[:5]]).reshape(-1, 3, 32, 32)
    assert loaded.train_inputs.dtype == torch.uint8
    assert np.array_equal(loaded.train_inputs.numpy(), train)
    assert loaded.train_targets.tolist() == [label for entry in entries[:5] for label in entry["labels"]]
    assert loaded.test_targets.tolist() == entries[5]["labels"]
    assert loaded.checksums["cifar-10-batches-py/test_batch/official_md5"] == "different"
    assert len(loaded.checksums["cifar-10-batches-py/test_batch"]) == 64
    data.check("cifar10", str(tmp_path))


def test_cifar_may_be_taken_in_part(tmp_path: Path) -> None:
    write_cifar(tmp_path, 2, str)
    whole = _load("cifar10", root=str(tmp_path), seed=0)
    few = len(whole.train_targets) - 1
    part = _load("cifar10", root=str(tmp_path), seed=0, num_train=few, num_test=1)
    assert torch.equal(part.train_inputs, whole.train_inputs[:few])
    assert torch.equal(part.test_targets, whole.test_targets[:1])
    _assert_consistent(part, data.info("cifar10", str(tmp_path), num_train=few, num_test=1))


def test_cifar_100_reads_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for first, name in enumerate(("train", "test")):
        rows = cifar_entry(first)["data"]
        entry = {"data": rows, "coarse_labels": [0, 1, 2, 19], "fine_labels": [first, 7, 42, 99]}
        (folder / name).write_bytes(pickle.dumps(entry))
    loaded = _load("cifar100", root=str(tmp_path))
    _assert_consistent(loaded, data.info("cifar100", str(tmp_path)))
    assert loaded.num_classes == 100
    assert loaded.train_targets.tolist() == [0, 7, 42, 99]
    assert loaded.test_targets.tolist() == [1, 7, 42, 99]
    assert loaded.checksums["cifar-100-python/train/official_md5"] == "different"
    (folder / "test").write_bytes(pickle.dumps(cifar_entry(0)))  # CIFAR-10's key
    with pytest.raises(ValueError, match=r"test is not a CIFAR-100 batch \(no 'fine_labels' in it\)"):
        data.check("cifar100", str(tmp_path))


def test_a_batch_written_by_python_2_is_read() -> None:
    entry = cifar_entry(3)
    got = pickles.loads(python2_pickle(entry))
    assert np.array_equal(got["data"], entry["data"])
    assert got["labels"] == entry["labels"]


def spoil(entry: dict[str, Any], **changes: Any) -> bytes:
    return pickle.dumps({key: value for key, value in (entry | changes).items() if value is not None})


class Evil:
    """Runs a function of its choice when an ordinary unpickler reads it."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


GOOD = cifar_entry(0)
TORN = [
    (b"", r"Ran out of input"),
    (pickle.dumps(GOOD)[:5000], r"truncated"),
    (b"<html>404</html>", r"invalid load key"),
    (pickle.dumps([1, 2]), r"it holds a list, not a dict"),
    (spoil(GOOD, labels=None), r"no 'labels' in it"),
    (
        spoil(GOOD, data=GOOD["data"][:, :3000]),
        r"data must be uint8 of shape \(num, 3072\).*got uint8 of shape \(4, 3000",
    ),
    (spoil(GOOD, data=GOOD["data"].astype(np.float32)), r"got float32 of shape \(4, 3072\)"),
    (spoil(GOOD, data=GOOD["data"][:0], labels=[]), r"num at least 1, got uint8 of shape \(0, 3072\)"),
    (spoil(GOOD, data="pixels"), r"got str"),
    (spoil(GOOD, data=np.array(7, dtype=np.uint8)), r"got uint8 of shape \(\)"),
    (spoil(GOOD, labels=[0, 1, 2]), r"labels must be 4 integers, one per image, got int64 of shape \(3,\)"),
    (spoil(GOOD, labels=[0, 1, 2, 0.5]), r"labels must be 4 integers, one per image, got float64"),
    (spoil(GOOD, labels=[0, 1, 2, 10]), r"labels must be in 0\.\.9, got 0\.\.10"),
    (spoil(GOOD, labels=[0, 1, 2, -1]), r"labels must be in 0\.\.9, got -1\.\.2"),
]


@pytest.mark.parametrize(("content", "message"), TORN, ids=range(len(TORN)))
def test_a_torn_batch_names_file_fault_and_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    (write_cifar(tmp_path) / "data_batch_3").write_bytes(content)
    for entry in (data.load, data.check, data.info):
        with pytest.raises(ValueError, match=message) as raised:
            entry("cifar10", root=str(tmp_path))
        text = str(raised.value)
        assert text.startswith(f"{tmp_path}/cifar-10-batches-py/data_batch_3 is not a CIFAR-10 batch")
        assert text.endswith(f"/cifar-10-batches-py and run python -m data.prepare cifar10 --root {tmp_path}")
        assert "\n" not in text


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_foreign_pickle_cannot_run_code(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    content = pickle.dumps(cifar_entry(0) | {"labels": Evil(str(marker))}, protocol=protocol)
    (write_cifar(tmp_path) / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match=r"it asks for \w+\.mkdir, which no array needs"):
        data.check("cifar10", str(tmp_path))
    assert not marker.exists()


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"py is not a folder: run python -m data.prepare cifar10 --root "):
        data.check("cifar10", str(tmp_path))
    folder = write_cifar(tmp_path)
    (folder / "test_batch").unlink()
    with pytest.raises(ValueError, match=r"test_batch cannot be read \(No such file or directory\): remove"):
        data.check("cifar10", str(tmp_path))
    (folder / "test_batch").mkdir()
    with pytest.raises(ValueError, match=r"test_batch cannot be read \(Is a directory\): remove"):
        data.check("cifar10", str(tmp_path))


@pytest.mark.real_data
def test_real_cifar_is_whole() -> None:
    root = os.environ.get("MICRO_DATA")
    if not root or not (Path(root) / "cifar-10-batches-py").is_dir():
        pytest.skip("MICRO_DATA names no folder that holds cifar-10-batches-py")
    loaded = _load("cifar10", root=root, seed=0)
    _assert_consistent(loaded, data.info("cifar10", root))
    assert loaded.train_targets.bincount().tolist() == [5000] * 10
    assert loaded.test_targets.bincount().tolist() == [1000] * 10
    for channel, (mean, std) in enumerate(zip(loaded.mean, loaded.std, strict=True)):
        pixels = loaded.train_inputs[:, channel].float().div_(255)
        assert pixels.mean().item() == pytest.approx(mean, abs=1e-3)
        assert pixels.std().item() == pytest.approx(std, abs=3e-3)  # a copy by way of JPEG loses a little contrast


# What these tests share


def _batches(loaded: data.Classification, **changes: Any) -> data.ShardedBatches:
    settings: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 2, "seed": 0} | changes
    inputs, targets = loaded.train_inputs, loaded.train_targets
    return data.ShardedBatches(inputs, targets, mean=loaded.mean, std=loaded.std, **settings)


def _load(name: str, **settings: Any) -> data.Classification:
    loaded = data.load(name, **settings)
    assert isinstance(loaded, data.Classification)
    return loaded


def _assert_consistent(loaded: data.Classification, info: data.DatasetInfo) -> None:
    assert info.kind == "images"
    assert list(info.sizes) == ["in_channels", "num_classes", "image_size"]
    channels, num_classes, side = info.sizes.values()
    assert loaded.train_inputs.shape == (info.num_train, channels, side, side)
    assert loaded.test_inputs.shape == (info.num_test, channels, side, side)
    assert (loaded.num_classes, loaded.in_channels) == (num_classes, channels)
    for targets, num in ((loaded.train_targets, info.num_train), (loaded.test_targets, info.num_test)):
        assert targets.dtype == torch.int64
        assert targets.shape == (num,)
        assert targets.min() >= 0
        assert targets.max() < num_classes
    assert len(loaded.mean) == len(loaded.std) == channels
    assert loaded.checksums
