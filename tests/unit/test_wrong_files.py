"""A file of a data set that is missing, torn or of another kind is refused in one line with its path and a remedy."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
LABELS = [0, 1, 2, 3]


def npy(path: Path, array: np.ndarray) -> bytes:
    np.save(path, array)
    return path.read_bytes()


def files_of(name: str, root: Path) -> dict[str, bytes]:
    """Return the files of a small right data set."""
    if name == "cifar10":
        batch = pickle.dumps({"data": IMAGES, "labels": LABELS})
        return {f"cifar-10-batches-py/{n}": batch for n in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]}
    if name == "imagenet":
        arrays = {"images": IMAGES.reshape(4, 3, 32, 32), "labels": np.array([0, 1, 1, 0])}
        files = {f"imagenet/{s}_{k}.npy": npy(root / "a.npy", a) for s in ("train", "val") for k, a in arrays.items()}
        return files | {"imagenet/classes.json": b'["n01", "n02"]'}
    if name == "wikitext2":
        return {f"wikitext-2/wiki.{split}.tokens": b"the cat\n" for split in ("train", "valid")}
    return {"ml-100k/u.data": b"1\t2\t5\t10\n"}


def batch(**changes: Any) -> bytes:
    return pickle.dumps({"data": IMAGES, "labels": LABELS} | changes)


CIFAR, WIKI, RATINGS = "cifar-10-batches-py/data_batch_3", "wikitext-2/wiki.train.tokens", "ml-100k/u.data"
TRAIN, VAL = "imagenet/train_images.npy", "imagenet/val_labels.npy"
WRONG: list[tuple[str, str, Any, str]] = [
    ("cifar10", CIFAR, None, "No such file"),
    ("cifar10", CIFAR, b"", "Ran out of input"),
    ("cifar10", CIFAR, batch()[:5000], "truncated"),
    ("cifar10", CIFAR, b"<html>404</html>", "invalid load key"),
    ("cifar10", CIFAR, pickle.dumps([1, 2]), "a list"),
    ("cifar10", CIFAR, pickle.dumps({"data": IMAGES, "fine_labels": LABELS}), "'labels'"),
    ("cifar10", CIFAR, batch(data=IMAGES[:, :3000]), "uint8 of shape (4, 3000)"),
    ("cifar10", CIFAR, batch(data=IMAGES.astype(np.float32)), "float32 of shape (4, 3072)"),
    ("cifar10", CIFAR, batch(data=IMAGES[:0], labels=[]), "num at least 1"),
    ("cifar10", CIFAR, batch(labels=[0, 1, 2]), "int64 of shape (3,)"),
    ("cifar10", CIFAR, batch(labels=[0, 1, 2, 0.5]), "float64"),
    ("cifar10", CIFAR, batch(labels=[0, 1, 2, 10]), "0..10"),
    ("wikitext2", WIKI, None, "No such file"),
    ("wikitext2", WIKI, b"\n \n", "no words"),
    ("wikitext2", WIKI, b"ab \xff\xfe", "UTF-8 (byte 3"),
    ("movielens100k", RATINGS, b"", "no data"),
    ("movielens100k", RATINGS, b"<html>\n", "'<html>'"),
    ("movielens100k", RATINGS, b"1\t2\t3\t4.5\n", "'4.5'"),
    ("imagenet", TRAIN, b"torn", "torn or no .npy file"),
    ("imagenet", TRAIN, np.zeros((4, 3, 32, 31), np.uint8), "(4, 3, 32, 31)"),
    ("imagenet", TRAIN, np.zeros((4, 3, 8, 8), np.uint8), "at most the 8 pixels"),
    ("imagenet", VAL, np.array([0, 1, 1, 2]), "does not fit"),
    ("imagenet", VAL, np.array([0]), "does not fit"),
    ("imagenet", "imagenet/classes.json", b"{", "classes.json"),
]


@pytest.mark.parametrize(("name", "file", "content", "words"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_refused_with_its_path_and_a_remedy(
    tmp_path: Path, name: str, file: str, content: Any, words: str
) -> None:
    if isinstance(content, np.ndarray):
        content = npy(tmp_path / "a.npy", content)
    for path, right in (files_of(name, tmp_path) | {file: content}).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        if right is not None:
            (tmp_path / path).write_bytes(right)
    settings: dict[str, Any] = {"image_size": 9} if name == "imagenet" else {}
    for call in (data.load, data.check):
        with pytest.raises(ValueError, match=Path(file).stem) as raised:
            call(name, root=str(tmp_path), **settings)
        line = str(raised.value)
        assert words in line
        assert "\n" not in line
        assert f"python -m data.prepare {name}" in line or "image_size" in line


class Evil:
    """Runs a function of its choice when an ordinary unpickler reads it."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_foreign_pickle_cannot_run_code(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    content = pickle.dumps({"data": IMAGES, "labels": Evil(str(tmp_path / "ran"))}, protocol=protocol)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match=r"\w+\.mkdir"):
        data.check("cifar10", str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("name", "module"), [("digits", "sklearn"), ("manuals", "pydoc_data.topics")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"dataset {name} needs .* install"):
        data.check(name)
