"""A wrong setting or file of a data set is one line with what was given, its path and a remedy, and runs no code."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data
from tests.data_sets import written
from tests.refusals import refused

SIZED = "must be a whole number of at least 1"
SETTINGS: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    ("cifar", {}, ("dataset must be one of cifar10, ", "got 'cifar'; did you mean 'cifar10'?")),
    ("synthetic", {"size": 8}, ("allows only num_samples, image_size, channels, num_classes, got 'size'",)),
    ("cifar10", {"root": None}, ("dataset cifar10 needs a data root", None)),
    ("cifar10", {}, ("py is not a folder: run python -m data.prepare cifar10 --root ",)),
    ("cifar10", {"num_train": 0}, ("num_train", SIZED, 0)),
    ("wikitext2", {"train": "dev"}, ("train of wikitext2 must be one of train, valid, test", "dev")),
    ("ptb", {"train": "test"}, ("train and test of ptb must be different splits", "test")),
    ("wikitext2", {"lower": 1}, ("lower of wikitext2 must be true or false", 1)),
    ("wikitext2", {"max_words": 2}, ("max_words of wikitext2 must be a whole number of at least 3", 2)),
    ("manuals", {"lower": True}, ("allows only max_words, num_train, num_test, got 'lower'",)),
    ("text", {"root": None}, ("dataset text needs a root",)),
    ("text", {"root": "/nowhere/at/all"}, ("is not a folder",)),
    ("text", {"unit": "letters"}, ("unit of text must be one of bytes, words, tokens", "letters")),
    ("text", {"endings": ""}, ("endings of text must be endings of names between commas", "''")),
    ("text", {"endings": "rst"}, ("has no file of text", "endings=rst", "set endings to txt")),
    ("text", {"max_words": 100}, ("max_words of text is for words, got 100 for bytes",)),
    ("text", {"unit": "words"}, ("a.txt is not text in UTF-8",)),
    ("text", {"unit": "tokens", "max_words": 300}, ("a.txt is not text in UTF-8", "use unit=bytes")),
    *(("text", {"unit": "tokens", "max_words": given}, ("max_words of text", given)) for given in (None, 255, "300")),
    ("latent", {"num_taken": 2.0}, ("num_taken of latent must be a whole number", 2.0)),
    ("latent", {"num_items": 120}, ("num_items must be at least num_taken + 1 + num_negatives = 121", 120)),
    ("movielens1m", {"root": None}, ("dataset movielens1m needs a data root", "holds ml-1m")),
]


@pytest.mark.parametrize(("name", "settings", "parts"), SETTINGS)
def test_a_wrong_setting_is_refused_before_a_file_is_read(
    name: str, settings: dict[str, Any], parts: tuple[Any, ...], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe some text")
    for call in (data.load, data.check, data.info):
        refused(lambda call=call: call(name, **({"root": str(tmp_path)} | settings)), *parts)  # type: ignore[misc]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.txt"]


IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)


def npy(path: Path, array: np.ndarray) -> bytes:
    np.save(path, array)
    return path.read_bytes()


def batch(**changes: Any) -> bytes:
    return pickle.dumps({"data": IMAGES, "labels": [0, 1, 2, 3]} | changes)


def files_of(name: str, root: Path) -> dict[str, bytes]:
    """Return the files of a small right data set."""
    if name == "cifar10":
        parts = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        return {f"cifar-10-batches-py/{part}": batch() for part in parts}
    if name == "imagenet":
        arrays = {"images": IMAGES.reshape(4, 3, 32, 32), "labels": np.array([0, 1, 1, 0])}
        files = {f"imagenet/{s}_{k}.npy": npy(root / "a.npy", a) for s in ("train", "val") for k, a in arrays.items()}
        return files | {"imagenet/classes.json": b'["n01", "n02"]'}
    if name == "wikitext2":
        return {f"wikitext-2/wiki.{split}.tokens": b"the cat\n" for split in ("train", "valid")}
    return {"ml-100k/u.data": b"1\t2\t5\t10\n"}


CIFAR, WIKI, RATINGS = "cifar-10-batches-py/data_batch_3", "wikitext-2/wiki.train.tokens", "ml-100k/u.data"
TRAIN, VAL = "imagenet/train_images.npy", "imagenet/val_labels.npy"
FILES: list[tuple[str, str, Any, str]] = [
    ("cifar10", CIFAR, None, "No such file"),
    ("cifar10", CIFAR, batch()[:5000], "truncated"),
    ("cifar10", CIFAR, pickle.dumps([1, 2]), "a list"),
    ("cifar10", CIFAR, batch(data=IMAGES[:, :3000]), "uint8 of shape (4, 3000)"),
    ("cifar10", CIFAR, batch(data=IMAGES.astype(np.float32)), "float32 of shape (4, 3072)"),
    ("cifar10", CIFAR, batch(labels=[0, 1, 2]), "int64 of shape (3,)"),
    ("cifar10", CIFAR, pickle.dumps({"data": IMAGES, "fine_labels": [0, 1, 2, 3]}), "'labels'"),
    ("cifar10", CIFAR, batch(labels=[0, 1, 2, 10]), "0..10"),
    ("wikitext2", WIKI, b"\n \n", "no words"),
    ("wikitext2", WIKI, b"ab \xff\xfe", "UTF-8 (byte 3"),
    ("movielens100k", RATINGS, b"<html>\n", "'<html>'"),
    ("movielens100k", RATINGS, b"1\t2\t3\t4.5\n", "'4.5'"),
    ("imagenet", TRAIN, b"torn", "torn or no .npy file"),
    ("imagenet", TRAIN, np.array([pickle.loads, b"code"], dtype=object), "train_images"),
    ("imagenet", TRAIN, np.zeros((4, 3, 32, 31), np.uint8), "(4, 3, 32, 31)"),
    ("imagenet", TRAIN, np.zeros((4, 3, 8, 8), np.uint8), "at most the 8 pixels"),
    ("imagenet", VAL, np.array([0, 1, 1, 2]), "does not fit"),
    ("imagenet", VAL, np.array([0]), "does not fit"),
    ("imagenet", "imagenet/classes.json", b"{", "classes.json"),
]


@pytest.mark.parametrize(("name", "file", "content", "part"), FILES, ids=range(len(FILES)))
def test_a_wrong_file_is_refused_with_its_path_and_a_remedy(
    tmp_path: Path, name: str, file: str, content: Any, part: str
) -> None:
    right = files_of(name, tmp_path)
    wrong = npy(tmp_path / "a.npy", content) if isinstance(content, np.ndarray) else content
    written(tmp_path, right | {file: wrong} if wrong is not None else {f: c for f, c in right.items() if f != file})
    settings: dict[str, Any] = {"image_size": 9} if name == "imagenet" else {}
    for call in (data.load, data.check):
        line = refused(lambda call=call: call(name, root=str(tmp_path), **settings), Path(file).stem, part)  # type: ignore[misc]
        assert f"python -m data.prepare {name}" in line or "image_size" in line


class Evil:
    """Makes a folder when an ordinary unpickler reads it."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_foreign_pickle_cannot_run_code(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps({"data": IMAGES, "labels": Evil(str(tmp_path / "ran"))}, protocol=protocol)
    written(tmp_path, {"cifar-10-batches-py/data_batch_1": content})
    refused(lambda: data.check("cifar10", str(tmp_path)), ".mkdir")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("name", "module"), [("digits", "sklearn"), ("manuals", "pydoc_data.topics")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    refused(lambda: data.check(name), f"dataset {name} needs ", "install")
