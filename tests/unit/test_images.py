"""Image sets, and what is done to the images of a batch."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import data
from data import augment, pickles
from tests.data_sets import load, written

PLAIN: dict[str, Any] = {"mean": (0.0,), "std": (1.0,), "rank": 0, "world_size": 1}


def draws(num: int, per_image: int) -> torch.Tensor:
    return torch.randint(2**31, (num, per_image), generator=data.generator(0))


# Augmentation, against one image or one pixel at a time


def test_crop_flip_equals_one_image_at_a_time() -> None:
    images = torch.randint(1, 256, (64, 3, 6, 5), dtype=torch.uint8, generator=data.generator(1))
    drawn = draws(64, 3)
    cropped = augment.crop_flip(images, drawn, (6, 5))
    assert cropped.dtype == torch.uint8
    for image, (top, left, mirror), got in zip(images, drawn.tolist(), cropped, strict=True):
        padded = F.pad(image, (4, 4, 4, 4))
        expected = padded[:, top % 9 : top % 9 + 6, left % 9 : left % 9 + 5]
        assert torch.equal(got, expected.flip(2) if mirror % 2 else expected)


@pytest.mark.parametrize("size", [(7, 7), (5, 8)])
def test_rotation_equals_one_pixel_at_a_time(size: tuple[int, int]) -> None:
    height, width = size
    images = torch.randint(1, 256, (6, 2, height, width), dtype=torch.uint8, generator=data.generator(2))
    drawn = draws(6, 4)
    got = augment.crop_flip_rotate(images, drawn, size)
    assert got.dtype == torch.uint8
    for crop, draw, turned in zip(augment.crop_flip(images, drawn, size), drawn[:, 3].tolist(), got, strict=True):
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


def test_resized_crop_equals_one_image_at_a_time() -> None:
    images = torch.randint(256, (40, 2, 20, 24), dtype=torch.uint8, generator=data.generator(3))
    drawn = draws(40, 23)
    drawn[0, 3:] = 2**31 - 1  # the whole area at an aspect of 4 / 3 never fits: the largest square is taken
    got = augment.resized_crop(images, drawn, (9, 11))
    assert got.dtype == torch.float32
    for image, draw, crop in zip(images, drawn.tolist(), got, strict=True):
        top, left, height, width = rectangle(draw, 20, 24)
        part = image[None, :, top : top + height, left : left + width].float()
        expected = F.interpolate(part, (9, 11), mode="bilinear", align_corners=False)[0]
        assert torch.allclose(crop, expected.flip(2) if draw[2] % 2 else expected, atol=2e-3)


def rectangle(draw: list[int], rows: int, columns: int) -> tuple[int, int, int, int]:
    """The first of ten drawn rectangles that fits."""
    for area_draw, aspect_draw in zip(draw[3:13], draw[13:], strict=True):
        area = rows * columns * (0.08 + 0.92 * area_draw / 2**31)
        aspect = math.exp(math.log(3 / 4) + aspect_draw / 2**31 * math.log(16 / 9))
        height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < height <= rows and 0 < width <= columns:
            break
    else:
        height = width = min(rows, columns)
    return draw[0] % (rows - height + 1), draw[1] % (columns - width + 1), height, width


@pytest.mark.parametrize("augmentation", list(augment.AUGMENTATIONS))
def test_images_come_out_at_the_size_asked_for_and_on_the_device(augmentation: str) -> None:
    settings: dict[str, Any] = PLAIN | {"batch_size": 8, "image_size": 6, "augment": augmentation, "seed": 0}
    batches = data.ShardedBatches(
        torch.ones(8, 1, 9, 9), torch.zeros(8), **settings, device=torch.device("meta")
    )  # stands in for an accelerator: it has shapes only
    ((shown, targets),) = batches.epoch(0)
    assert shown.shape == (8, 1, 6, 6)
    assert {shown.device.type, targets.device.type} == {"meta"}
    numbered = torch.arange(50).view(2, 1, 5, 5)
    assert torch.equal(augment.centre(numbered, (3, 3)), numbered[:, :, 1:4, 1:4])


def test_pixels_are_normalised_and_uint8_counts_as_a_fraction_of_255() -> None:
    images = torch.randint(256, (12, 3, 4, 4), dtype=torch.uint8, generator=data.generator(4))
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = ((images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)).float()
    settings: dict[str, Any] = PLAIN | {"mean": mean, "std": std, "batch_size": 12}
    for inputs in (images, images / 255):
        ((got, _),) = data.EvalBatches(inputs, torch.zeros(12), **settings)
        torch.testing.assert_close(got, expected)
        ((got, chosen),) = data.ShardedBatches(inputs, torch.arange(12), seed=0, **settings).epoch(0)
        torch.testing.assert_close(got, expected[chosen])


# Sets without files


def test_digits_are_split_once_and_evenly_and_nothing_is_lost() -> None:
    from sklearn.datasets import load_digits

    loaded, again = load("digits", seed=1), load("digits", seed=2)
    train, test = loaded.train_targets.bincount(), loaded.test_targets.bincount()
    assert int(test.sum()) == 360
    assert ((train + test) * 360 / 1797 - test).abs().max() <= 1
    both = torch.cat([loaded.train_inputs, loaded.test_inputs]).flatten(1).mul(16).long().tolist()
    assert sorted(both) == sorted(load_digits().data.astype(int).tolist())
    assert torch.equal(loaded.test_inputs, again.test_inputs)
    assert loaded.train_inputs.mean().item() == pytest.approx(loaded.mean[0])
    assert loaded.train_inputs.std(correction=0).item() == pytest.approx(loaded.std[0])


def test_synthetic_images_follow_seed_and_settings_and_can_be_classified() -> None:
    settings: dict[str, Any] = {"num_samples": 50, "image_size": 4, "channels": 2, "num_classes": 3}
    first, again, other = (load("synthetic", seed=seed, **settings) for seed in (5, 5, 6))
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert first.checksums == again.checksums != other.checksums
    assert first.train_inputs.shape == (50, 2, 4, 4)
    assert first.train_targets.bincount().tolist() == [17, 17, 16]
    loaded = load("synthetic")
    flat = loaded.train_inputs.flatten(1)
    centres = torch.stack([flat[loaded.train_targets == label].mean(0) for label in range(10)])
    nearest = torch.cdist(loaded.test_inputs.flatten(1), centres).argmin(1)
    assert (nearest == loaded.test_targets).float().mean() > 0.95


# CIFAR, from files that the test writes


def entry(first: int) -> dict[str, Any]:
    rows = np.random.default_rng(first).integers(0, 256, (4, 3072), dtype=np.uint8)
    return {"data": rows, "labels": [(first + i) % 10 for i in range(4)]}


@pytest.mark.parametrize(("protocol", "key"), [(2, str.encode), (4, str), (5, str)])
def test_cifar_10_is_read_from_the_official_layout_whole_or_in_part(tmp_path: Path, protocol: int, key: Any) -> None:
    entries = [entry(first) for first in range(6)]
    for name, content in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], entries, strict=True):
        stored = pickle.dumps({key(name): value for name, value in content.items()}, protocol=protocol)
        written(tmp_path, {f"cifar-10-batches-py/{name}": stored})
    loaded = load("cifar10", tmp_path)
    assert loaded.train_inputs.dtype == torch.uint8
    train = np.concatenate([entry["data"] for entry in entries[:5]]).reshape(-1, 3, 32, 32)
    assert np.array_equal(loaded.train_inputs.numpy(), train)
    assert loaded.train_targets.tolist() == [label for entry in entries[:5] for label in entry["labels"]]
    assert loaded.test_targets.tolist() == entries[5]["labels"]
    assert loaded.checksums["cifar-10-batches-py/test_batch/official_md5"] == "different"
    part = load("cifar10", tmp_path, num_train=19, num_test=1)
    assert torch.equal(part.train_inputs, loaded.train_inputs[:19])
    assert torch.equal(part.test_targets, loaded.test_targets[:1])


def test_cifar_100_reads_the_fine_labels(tmp_path: Path) -> None:
    for first, name in enumerate(("train", "test")):
        labels = {"coarse_labels": [0, 1, 2, 19], "fine_labels": [first, 7, 42, 99]}
        content = pickle.dumps({"data": entry(first)["data"], **labels})
        written(tmp_path, {f"cifar-100-python/{name}": content})
    loaded = load("cifar100", tmp_path)
    assert loaded.train_targets.tolist() == [0, 7, 42, 99]
    assert loaded.test_targets.tolist() == [1, 7, 42, 99]


def test_a_batch_written_by_python_2_is_read() -> None:
    """Its byte-string keys, raw bytes and the module names of numpy 1."""

    def string(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value  # BINSTRING

    rows, labels = entry(3).values()
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + string(b"b") + b"tR"
    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + b"K\x00K\x01tR(K\x03" + string(b"|") + b"NNN"
    dtype += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01(" + b"".join(b"M" + size.to_bytes(2, "little") for size in rows.shape) + b"t" + dtype
    state += b"\x89" + string(rows.tobytes()) + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    got = pickles.loads(b"\x80\x02}(" + string(b"data") + array + state + string(b"labels") + listed + b"u.")
    assert np.array_equal(got["data"], rows)
    assert got["labels"] == labels
