"""Photographs of ImageNet's layout are converted whole, or not at all, and read in place."""

import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import data
from data import convert, file_sums, prepare
from tests.refusals import refused

image = pytest.importorskip("PIL.Image")
TRAIN = ["n01/c.jpg", "n01/d.png", "n02/a.JPEG", "n02/b.JPEG"]
SIDES = [(16, 50), (9, 12), (40, 20), (20, 20)]
SHAPES = {f"train/{name}": sides for name, sides in zip(TRAIN, SIDES, strict=True)} | {"val/n02/e.JPEG": (30, 31)}


@dataclass
class Photographs:
    """Photographs, and the root that they are converted into."""

    origin: Path
    root: Path
    capsys: pytest.CaptureFixture[str]

    def convert(self, size: int = 12, *, code: int = 0, origin: Path | None = None) -> str:
        """Return what the command says: its output, or the line of its error."""
        words = ["imagenet", "--from", str(origin or self.origin), "--size", str(size), "--processes", "1"]
        assert prepare.main([*words, "--root", str(self.root)]) == code
        said = self.capsys.readouterr()
        return said.err.splitlines()[-1] if code else said.out

    def stored(self, name: str = "train_images") -> np.ndarray:
        return np.load(self.root / "imagenet" / f"{name}.npy")

    def expected(self, name: str, size: int) -> np.ndarray:
        """Shorter side resized, then the middle; done by hand."""
        opened = image.open(self.origin / name).convert("RGB")
        side = min(opened.size)
        left, top = (opened.width - side) / 2, (opened.height - side) / 2
        box = (left, top, left + side, top + side)
        return np.asarray(opened.resize((size, size), image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)


@pytest.fixture
def photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Photographs:
    random = np.random.default_rng(0)
    for name, (width, height) in SHAPES.items():
        path = tmp_path / "photographs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        made = image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        (made.convert("L") if name.endswith("png") else made).save(path)
    (tmp_path / "photographs" / "train" / "n01" / "notes.txt").write_text("no photograph")
    return Photographs(tmp_path / "photographs", tmp_path / "root", capsys)


def test_photographs_are_converted_and_read_in_place(photographs: Photographs) -> None:
    assert "train/n01/notes.txt" in photographs.convert()  # what is left out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = data.load("imagenet", root=str(photographs.root), image_size=8)
    assert isinstance(loaded, data.Classification)
    for stored, name in zip(loaded.train_inputs, TRAIN, strict=True):
        assert np.array_equal(stored.numpy(), photographs.expected(f"train/{name}", 12))
    assert (loaded.train_targets.tolist(), loaded.test_targets.tolist()) == ([0, 0, 1, 1], [1])
    middle = photographs.expected("val/n02/e.JPEG", 12)[:, 2:10, 2:10]
    assert np.array_equal(loaded.test_inputs[0].numpy(), middle)
    assert "is already in" in photographs.convert()

    settings: dict[str, Any] = {"batch_size": 2, "rank": 0, "world_size": 1, "seed": 0, "augment": "resized_crop"}
    mapped, in_memory = (
        data.ShardedBatches(
            inputs, loaded.train_targets, image_size=8, mean=loaded.mean, std=loaded.std, **settings
        ).epoch(1)
        for inputs in (loaded.train_inputs, loaded.train_inputs.clone())
    )
    for (shown, _), (again, _) in zip(mapped, in_memory, strict=True):
        assert shown.shape == (2, 3, 8, 8)
        assert torch.equal(shown, again)


def test_a_killed_conversion_continues(photographs: Photographs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "CHUNK", 1)
    decode, decoded, limit = convert.decode, [], 2

    def counted(chunk: convert.Chunk) -> convert.Chunk:
        if len(decoded) == limit:
            raise SystemExit
        decoded.append(chunk.names[0])
        return decode(chunk)

    monkeypatch.setattr(convert, "decode", counted)
    with pytest.raises(SystemExit):
        photographs.convert()
    assert not (photographs.root / "imagenet").exists()
    done = photographs.root / ".prepare" / "imagenet" / "converted" / "done"
    done.write_text(done.read_text() + "train_im")  # a line that the crash tore
    limit = 9
    photographs.convert()
    assert decoded == [*TRAIN, "n02/e.JPEG"]
    for stored, name in zip(photographs.stored(), TRAIN, strict=True):
        assert np.array_equal(stored, photographs.expected(f"train/{name}", 12))


def coloured(root: Path, value: int, *, torn: bool) -> Path:
    """Write 300 images of one colour, whose files have the same names and sizes for every colour."""
    for split, num in (("train", 300), ("val", 1)):
        (root / split / "n01").mkdir(parents=True, exist_ok=True)
        for number in range(num):
            pixels = np.full((4, 4, 3), value, dtype=np.uint8)
            image.fromarray(pixels).save(root / split / "n01" / f"{number:03}.png", compress_level=0)
    if torn:
        (root / "train/n01/299.png").write_bytes(b"torn")
    return root


@pytest.mark.parametrize("colours", [[(10, True), (200, True), (10, False)], [(10, True), (200, False)]])
def test_an_interrupted_conversion_never_continues_with_other_photographs(
    photographs: Photographs, tmp_path: Path, colours: list[tuple[int, bool]]
) -> None:
    for colour, torn in colours:
        origin = coloured(tmp_path / str(colour), colour, torn=torn)
        photographs.convert(4, code=2 if torn else 0, origin=origin)
    assert np.unique(photographs.stored()).tolist() == [colours[-1][0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_of_8_and_of_16_bits_is_scaled_equally(photographs: Photographs, dtype: type) -> None:
    brightest = np.iinfo(dtype).max
    grey = (np.arange(100).reshape(10, 10) / 99 * brightest).astype(dtype)
    image.fromarray(grey).save(photographs.origin / "train/n01/d.png")
    photographs.convert(10)
    assert np.abs(photographs.stored()[1] / 255 - grey / brightest).max() < 1 / 255


def test_every_class_has_a_label_of_its_own_or_is_refused(photographs: Photographs) -> None:
    added = photographs.origin / "train" / "n011"
    added.mkdir()
    (photographs.origin / "train" / ".cache").mkdir()
    for name in (".DS_Store", "a.avif"):
        (added / name).write_bytes(b"not read")
        assert f"{added} " in photographs.convert(code=2)
    shutil.copy(photographs.origin / "train/n02/a.JPEG", added / "b.webp")  # decoded by its content
    assert "train/n011/a.avif" in photographs.convert()
    assert photographs.stored("train_labels").tolist() == [0, 0, 1, 2, 2]
    assert json.loads((photographs.root / "imagenet/classes.json").read_text()) == ["n01", "n011", "n02"]


def test_the_folders_in_that_of_a_class_are_part_of_it(photographs: Photographs) -> None:
    for inner in ("train/n01/late", "train/n03/only/deep", "train/n03/.hidden"):
        (photographs.origin / inner).mkdir(parents=True)
    shutil.copy(photographs.origin / "train/n02/b.JPEG", photographs.origin / "train/n01/late/x.jpg")
    shutil.copy(photographs.origin / "train/n02/b.JPEG", photographs.origin / "train/n03/only/deep/y.jpg")
    (photographs.origin / "train/n01/late/notes.md").write_text("no photograph")
    assert "train/n01/late/notes.md" in photographs.convert()
    assert photographs.stored("train_labels").tolist() == [0, 0, 0, 1, 1, 2]
    assert np.array_equal(photographs.stored()[2], photographs.stored()[5])


def test_names_that_are_not_utf8_are_names(photographs: Photographs) -> None:
    folder = os.fsencode(photographs.origin / "train/n02")
    try:
        os.rename(folder + b"/b.JPEG", folder + b"/caf\xe9.JPEG")
    except OSError:
        pytest.skip("this disk takes only names in UTF-8")
    (photographs.origin / "train" / os.fsdecode(b"n\xff")).mkdir()
    os.rename(folder + b"/a.JPEG", os.fsencode(photographs.origin) + b"/train/n\xff/a.JPEG")
    (photographs.origin / "train/n02" / os.fsdecode(b"\xe9.txt")).write_text("no photograph")
    assert "leaves out" in photographs.convert()
    assert photographs.stored("train_labels").tolist() == [0, 0, 1, 2]
    loaded = data.load("imagenet", root=str(photographs.root), image_size=8)
    assert isinstance(loaded, data.Classification)
    assert loaded.num_classes == 3


def test_photographs_are_converted_where_the_system_cannot_reserve_space(
    photographs: Photographs, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs.convert()
    with_it = {name: photographs.stored(name) for name in ("train_images", "val_images")}
    shutil.rmtree(photographs.root)
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(convert, "BLOCK", 100)
    photographs.convert()
    for name, pixels in with_it.items():
        assert np.array_equal(photographs.stored(name), pixels)


def test_several_processes_convert_to_the_same_bytes(
    tmp_path: Path, photographs: Photographs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "START_METHOD", "fork")  # spawned ones would import torch first, for seconds
    made = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        convert.convert(photographs.origin, folder, size=6, processes=processes)
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1]


def test_photographs_that_cannot_be_converted_are_named(photographs: Photographs) -> None:
    bad, tested = photographs.origin / "train/n02/b.JPEG", photographs.origin / "val"
    bad.write_bytes(bad.read_bytes()[:300])
    assert f"{bad} cannot be decoded" in photographs.convert(code=2)
    (tested / "n02").rename(tested / "n03")
    assert "val must hold classes of train, got 'n03'" in photographs.convert(code=2)
    shutil.rmtree(tested / "n03")
    assert "val must hold one folder per class" in photographs.convert(code=2)


def test_images_are_hashed_once_and_their_time_is_compared(
    photographs: Photographs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sums, "LARGE", 400)
    photographs.convert()
    place, array = str(photographs.root), "train_images.npy"
    before = data.sums("imagenet", place, image_size=8)
    np.save(photographs.root / "imagenet" / array, 255 - photographs.stored())
    line = refused(lambda: data.check("imagenet", place, image_size=8), f"{array} is not as it was prepared")
    assert "python -m data.prepare imagenet" in line
    photographs.convert()
    after = data.sums("imagenet", place, image_size=8)
    assert [name for name in before if after[name] != before[name]] == [array]
