"""A wrong setting of a data set is told in one line by everything that takes it, before a file is read."""

from pathlib import Path
from typing import Any

import pytest

import data

SIZED = r"must be a whole number of at least 1.*, got 0"
WRONG = [
    ("cifar", {}, r"dataset must be one of cifar10, .*synthetic.*, got 'cifar'; did you mean 'cifar10'\?"),
    ("digits", {"size": 8}, r"dataset 'digits' has no settings, got 'size'"),
    ("synthetic", {"size": 8}, r"allows only num_samples, image_size, channels, num_classes, got 'size'"),
    ("synthetic", {"num_samples": 0}, rf"num_samples of synthetic {SIZED}"),
    ("cifar10", {"root": None}, r"dataset cifar10 needs a data root, got None"),
    ("cifar10", {}, r"py is not a folder: run python -m data\.prepare cifar10 --root "),
    ("cifar10", {"num_train": 0}, rf"num_train of cifar10 {SIZED}"),
    ("imagenet", {"image_size": 0}, rf"image_size of imagenet {SIZED}"),
    ("wikitext2", {}, r"wikitext-2 is not a folder: run python -m data\.prepare wikitext2"),
    ("wikitext2", {"train": "dev"}, r"train of wikitext2 must be one of train, valid, test, got 'dev'"),
    ("ptb", {"train": "test"}, r"train and test of ptb must be different splits, got 'test'"),
    ("wikitext2", {"lower": 1}, r"lower of wikitext2 must be true or false, got 1"),
    ("wikitext2", {"max_words": 2}, r"max_words of wikitext2 must be a whole number of at least 3.*, got 2"),
    ("manuals", {"lower": True}, r"dataset 'manuals' allows only max_words, num_train, num_test, got 'lower'"),
    ("text", {"root": None}, r"dataset text needs a root"),
    ("text", {"root": "/nowhere/at/all"}, r"is not a folder"),
    ("text", {"unit": "letters"}, r"unit of text must be one of bytes, words, tokens, got 'letters'"),
    ("text", {"endings": ""}, r"endings of text must be endings of names between commas, got ''"),
    ("text", {"endings": "rst"}, r"has no file of text that ends in \.rst: set endings"),
    ("text", {"max_words": 100}, r"max_words of text is for words, got 100 for bytes"),
    ("text", {"unit": "words"}, r"a\.txt is not text in UTF-8"),
    ("text", {"unit": "tokens", "max_words": 300}, r"a\.txt is not text in UTF-8 .*: use unit=bytes"),
    *(
        ("text", {"unit": "tokens", "max_words": given}, r"max_words of text must be .*, got")
        for given in (None, 255, "300")
    ),
    ("latent", {"num_taken": 2.0}, r"num_taken of latent must be a whole number .*got 2\.0"),
    ("latent", {"strength": -1.0}, r"strength of latent must be a finite number of at least 0, got -1\.0"),
    ("latent", {"num_items": 120}, r"num_items must be at least num_taken \+ 1 \+ num_negatives = 121, got 120"),
    ("movielens1m", {"root": None}, r"dataset movielens1m needs a data root, got None: .* holds ml-1m"),
    ("movielens100k", {}, r"ml-100k is not a folder: run python -m data\.prepare movielens100k"),
]


@pytest.mark.parametrize(("name", "settings", "message"), WRONG)
def test_a_wrong_setting_is_told_in_one_line(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe some text")
    for call in (data.load, data.check, data.info):
        with pytest.raises(ValueError, match=message) as raised:
            call(name, **({"root": str(tmp_path)} | settings))
        assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.txt"]
