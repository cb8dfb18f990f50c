"""Texts in tokens: every byte is in one, the same text gives the same ones, and files are made once."""

import math
import sys
from pathlib import Path

import pytest
import torch

import data
from data import token_files
from data.source import Text
from experiments.training.tasks import LanguageTask

TEXT = "The reader reads what the reader wrote,\nzweimal für Ärzte 語 \u0000 and so on.\r\n\n" * 8
SETTINGS = {"unit": "tokens", "max_words": 300}
SPELLED = {letter: byte for byte, letter in zip(range(33, 127), map(chr, range(33, 127)), strict=True)}


def load(root: Path, **settings: object) -> Text:
    loaded = data.load("text", root=str(root), **SETTINGS | settings)
    assert isinstance(loaded, Text)
    return loaded


def in_splits(folder: Path, train: str = TEXT, test: str = TEXT[:100]) -> Path:
    (folder / "train.txt").write_bytes(train.encode())
    (folder / "valid.txt").write_bytes(test.encode())
    return folder


@pytest.mark.parametrize("mark", ["", "\ufeff"])  # of the byte order, no part of the text
def test_tokens_are_all_bytes_of_the_text_and_fewer_than_they(tmp_path: Path, mark: str) -> None:
    loaded = load(in_splits(tmp_path, train=mark + TEXT, test=mark + TEXT[:100]))
    assert loaded.num_bytes is not None
    assert len(loaded.words) == len(loaded.num_bytes) == 300
    for tokens, content in ((loaded.train, TEXT), (loaded.test, TEXT[:100])):
        assert int(loaded.num_bytes[tokens.long()].sum()) == len(content.encode())
        assert len(tokens) < 0.7 * len(content)
        spelled = "".join(loaded.words[token] for token in tokens.tolist()).replace("Ġ", " ")
        assert [letter for letter in spelled if letter in SPELLED] == [
            letter for letter in content if letter in SPELLED
        ]
    assert data.info("text", str(tmp_path), **SETTINGS).sizes["num_words"] == 300


def test_the_vocabulary_is_learnt_from_the_training_part_alone(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    one, other = load(in_splits(tmp_path / "a")), load(in_splits(tmp_path / "b", test="elsewhere elsewhere " * 50))
    assert one.words == other.words
    assert torch.equal(one.train, other.train)


def test_files_of_tokens_are_made_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(in_splits(tmp_path))
    with monkeypatch.context() as without:
        without.setattr(token_files, "_make", lambda *_: pytest.fail("made again"))
        assert torch.equal(load(tmp_path).train, first.train)
        assert torch.equal(load(tmp_path, num_train=5).train, first.train[:5])
    assert sorted(path.name for path in tmp_path.glob(".tokens/*/*")) == [
        "test.int32",
        "train.int32",
        "vocabulary.json",
    ]
    in_splits(tmp_path, train=TEXT + "More.\n")
    assert len(load(tmp_path).train) > len(first.train)  # another text has files of its own
    assert not list(tmp_path.glob(".tokens/making-*"))


def test_the_last_tenth_of_the_lines_is_held_out_where_names_do_not_tell(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"line {number}\n" for number in range(30)))
    loaded = load(tmp_path)
    assert loaded.num_bytes is not None
    assert int(loaded.num_bytes[loaded.test.long()].sum()) == len("line 27\nline 28\nline 29\n")


@pytest.mark.parametrize("num_lines", [1, 2, 9])
def test_a_tenth_of_a_file_of_few_lines_is_held_out(tmp_path: Path, num_lines: int) -> None:
    content = "\n".join(["zweimal für Ärzte 語 " * 30] * num_lines).encode()
    (tmp_path / "one.txt").write_bytes(content)
    loaded = load(tmp_path)
    assert loaded.num_bytes is not None
    train, test = (int(loaded.num_bytes[part.long()].sum()) for part in (loaded.train, loaded.test))
    assert train + test == len(content)
    assert len(content) / 10 - 5 < test <= len(content) / 10


@pytest.mark.parametrize("given", [None, 255, "300"])
def test_the_number_of_tokens_must_be_given(tmp_path: Path, given: object) -> None:
    with pytest.raises(ValueError, match="max_words of text must be at least 256 for tokens, got"):
        load(in_splits(tmp_path), max_words=given)


def test_what_is_no_text_and_a_missing_library_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_splits(tmp_path) / "train.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"train\.txt is not text in UTF-8 .*: use unit=bytes"):
        load(tmp_path)
    assert not list(tmp_path.glob(".tokens/*"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="unit=tokens of text needs the package tokenizers"):
        load(in_splits(tmp_path))


def test_bits_per_byte_count_the_bytes_of_the_tokens() -> None:
    measures = LanguageTask.measures(torch.tensor([6 * math.log(2), 12.0, 3.0]))  # 6 bits, 12 bytes, 3 tokens
    assert measures["bits_per_byte"] == pytest.approx(0.5)
    assert measures["perplexity"] == pytest.approx(4)
