"""Texts: words in files of the official layouts, any folder of text, and their vocabularies and tokens."""

import string
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import data
from data import text, token_files
from data.character_vocabulary import MAX_LENGTH
from data.source import Text
from tests.data_sets import load, written
from tests.refusals import refused

TRAIN = "the cat saw the dog \n the dog ran\n\n a <unk> ran\n"
VALID = "the dog saw a Bird"
PER_MARK = pytest.mark.parametrize("mark", ["", "\ufeff"])  # the byte-order mark is not part of a text
LAYOUTS = [
    ("wikitext2", "wikitext-2/wiki.{}.tokens"),
    ("wikitext2", "wikitext-2/{}.txt"),
    ("ptb", "ptb/ptb.{}.txt"),
]


def splits(layout: str = LAYOUTS[0][1], **contents: str | bytes) -> dict[str, str | bytes]:
    contents = {"train": TRAIN, "valid": VALID, "test": "a cat\n"} | contents
    return {layout.format(split): content for split, content in contents.items()}


def spelled(loaded: Text, part: Tensor) -> list[str]:
    return [loaded.words[number] for number in part.tolist()]


def as_bytes(part: Tensor) -> bytes:
    return bytes(part.tolist())


# Vocabulary and spelling


def test_a_vocabulary_is_by_frequency_then_alphabet_after_the_special_words() -> None:
    assert text.vocabulary(["b", "a", "c", "b", "a", "z"]) == ("<unk>", "<eos>", "a", "b", "c", "z")
    assert text.vocabulary(["b", "<eos>", "c", "b", "<unk>", "a"], 4) == ("<unk>", "<eos>", "b", "a")


def test_words_can_be_read_back_from_their_spelling() -> None:
    words = ("<unk>", "a", "Größe", "naïve", "漢字")
    letters, characters = data.characters_of_words(words), sorted(set("".join(words)))
    assert (letters.shape, letters.dtype) == ((5, 7), torch.int64)
    for word, (begin, *row) in zip(words, letters.tolist(), strict=True):
        assert begin == 1
        assert row[len(word) :] == [2] + [0] * (5 - len(word))
        assert "".join(characters[number - 3] for number in row[: len(word)]) == word
    letters = data.characters_of_words(["ab", "a" * 63, "a" * 63 + "b"])  # a long word keeps its first characters
    assert letters.shape == (3, MAX_LENGTH)
    assert letters[1].tolist() == letters[2].tolist() == [1, *[3] * 63, 2]


# The official layouts


@pytest.mark.parametrize(("dataset", "layout"), LAYOUTS)
@PER_MARK
def test_a_text_is_its_words_with_an_end_after_every_line(tmp_path: Path, dataset: str, layout: str, mark: str) -> None:
    written(tmp_path, splits(layout, train=mark + TRAIN, valid=mark + VALID))
    loaded = load(dataset, tmp_path, test="valid")
    assert spelled(loaded, loaded.train) == TRAIN.replace("\n", " <eos> ").split()
    assert spelled(loaded, loaded.test) == ["the", "dog", "saw", "a", "<unk>", "<eos>"]
    assert loaded.words[:5] == ("<unk>", "<eos>", "the", "dog", "ran")
    assert sorted(loaded.checksums) == [layout.format("train"), layout.format("valid")]
    assert len(load(dataset, tmp_path).test) == (6 if dataset == "wikitext2" else 3)  # the split each tests on


def test_settings_of_a_text_do_what_they_say(tmp_path: Path) -> None:
    written(tmp_path, splits(train="The the THE b b a\n", valid="the B \n"))
    assert load("wikitext2", tmp_path, lower=True).words == ("<unk>", "<eos>", "the", "b", "a")
    assert load("wikitext2", tmp_path, max_words=3).words == ("<unk>", "<eos>", "b")
    part = load("wikitext2", tmp_path, num_train=2, num_test=1)
    assert (part.words, part.test.tolist()) == (("<unk>", "<eos>", "The", "the"), [3])
    swapped = load("wikitext2", tmp_path, train="valid", test="train")
    assert spelled(swapped, swapped.test) == ["<unk>", "the", *["<unk>"] * 4, "<eos>"]


def test_only_line_ends_end_lines(tmp_path: Path) -> None:
    loaded = load("wikitext2", written(tmp_path, splits(train="a\r\nb c\x0cd\u2028e\x85f\n")))
    assert spelled(loaded, loaded.train) == ["a", "<eos>", "b", "c", "d", "e", "f", "<eos>"]


# Texts without a file


def test_manuals_need_no_file_and_test_on_nothing_learned() -> None:
    loaded, whole, in_bytes = load("manuals", seed=1), load("manuals", max_words=None), load("manuals_bytes")
    assert len(loaded.words) == 2000
    assert torch.equal(loaded.train, load("manuals", seed=2).train)
    assert (in_bytes.train.dtype, len(in_bytes.words)) == (torch.uint8, 256)
    lines = [" ".join(spelled(whole, part)).split("<eos>") for part in (whole.train, whole.test)]
    paragraphs = [as_bytes(part).decode().split("\n\n") for part in (in_bytes.train, in_bytes.test)]
    for train, test in (lines, paragraphs):
        assert not set(train) & set(test) - {"", " "}
    for content in (loaded, in_bytes):
        assert 0.05 < len(content.test) / len(content.train) < 0.2


# A folder of text


def test_a_folder_of_bytes_is_cut_at_the_last_tenth_of_each_file(tmp_path: Path) -> None:
    first, second = bytes(range(100)), "zwei für".encode() * 5
    loaded = load("text", written(tmp_path, {"a.txt": first, "b/c.md": second, "d.png": b"none", "empty.txt": b""}))
    cut = len(second) - len(second) // 10
    assert as_bytes(loaded.train) == first[:90] + second[:cut]
    assert as_bytes(loaded.test) == first[90:] + second[cut:]
    assert loaded.train.dtype == torch.uint8
    assert set(loaded.checksums) == {"a.txt", "b/c.md"}


@pytest.mark.parametrize(
    ("train", "test", "unused"),
    [
        (["wiki.train.tokens"], ["wiki.test.tokens"], []),
        (["wiki.train.tokens"], ["wiki.valid.tokens"], ["wiki.test.tokens"]),
        (["my-train_set.txt", "train01.md"], ["Val.TXT"], ["novel.txt", "constraints.md", "latest.txt"]),
        (["a.train.txt"], ["a.validation.txt"], ["train-test-split.md", "picture.png", "notes.pdf"]),
        (["train/a.txt", "train/deep/b.md"], ["test/c.txt"], ["d.txt"]),
        (["corpus/Train/evaluation.txt"], ["corpus/valid/constraints.txt"], ["corpus/test/e.txt"]),
        ([], [], ["constraints.md", "evaluation.md", "latest.txt", "retrained.raw"]),  # the last tenth of each
        ([], [], ["train.txt", "novel.txt"]),
        (["training/a.txt"], ["dev.txt"], ["README.md"]),
    ],
)
def test_whole_words_of_names_and_folders_tell_the_splits(
    tmp_path: Path, train: list[str], test: list[str], unused: list[str]
) -> None:
    hidden = [".train.txt", ".git/train.txt"]
    contents: dict[str, str | bytes] = {name: f"{name:30}" for name in [*train, *test, *unused, *hidden]}
    loaded = load("text", written(tmp_path, contents))
    used = sorted([*train, *test] or unused)
    assert sorted(loaded.checksums) == used
    assert sorted(loaded.unused) == sorted(unused if train else [])
    assert bool(data.info("text", str(tmp_path)).notes) == bool(train and unused)
    learnt = [contents[name] for name in train] or [contents[name][:27] for name in used]
    measured = [contents[name] for name in test] or [contents[name][27:] for name in used]
    parts = [as_bytes(part).decode() for part in (loaded.train, loaded.test)]
    assert parts == ["".join(map(str, learnt)), "".join(map(str, measured))]


def test_names_of_splits_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    root = written(tmp_path, {"test.txt": "measure this", "novel.txt": "learn this"})
    refused(lambda: data.check("text", str(root)), "test.txt", "no file of train")
    both = written(tmp_path, {"train/test.txt": "which?", "train/a.txt": "learn this"})
    refused(lambda: data.check("text", str(both)), "train/test.txt is of test and of train")


@pytest.mark.parametrize(
    ("files", "named", "endings"),
    [
        (["train/xaa", "train/xab", "test.txt"], "train/xaa", "txt,none"),
        (["train.jsonl", "test.txt"], "train.jsonl", "txt,jsonl"),
        (["train.txt.00", "train.txt.01", "test.txt"], "train.txt.00", "txt,00,01"),
        ([*(f"train.{part:02}" for part in range(9)), "test.txt"], "train.00", "all"),
        (["train.txt", "test.json"], "test.json", "txt,json"),
        (["corpus.xml", "README.md"], "corpus.xml", "xml"),
        (["corpus", "README.md"], "corpus", "none"),
        (["enwik8"], "enwik8", "none"),
    ],
)
def test_text_that_the_endings_leave_out_is_refused_and_read_when_it_is_named(
    tmp_path: Path, files: list[str], named: str, endings: str
) -> None:
    contents = {name: f"{name} " * (1 if "README" in name else 20) for name in files}
    root = written(tmp_path, contents)
    for check in (data.check, data.sums):
        refused(lambda check=check: check("text", str(root)), named, "set endings to", endings)
    loaded = load("text", root, endings=endings)
    assert named in loaded.checksums
    learnt = as_bytes(loaded.train).decode()
    assert "test" not in learnt or "test" not in named
    assert contents[named][:100] in learnt or "test" in named


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08\x00packed", "learn this".encode("utf-16"), b"caf\xe9 noir"])
def test_what_belongs_to_train_and_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    root = written(tmp_path, {"train.txt": "learn this", "train.gz": content, "valid.txt": "measure"})
    refused(lambda: data.check("text", str(root)), "train.gz", "no text in UTF-8")


def test_other_files_next_to_a_text_are_noted(tmp_path: Path) -> None:
    beside = {"LICENSE": "do as you like", "cover.png": b"\x89PNG\0" * 999, "utf16": "much".encode("utf-16") * 999}
    root = written(tmp_path, {"novel.txt": "learn this " * 9, **beside})
    (note,) = data.info("text", str(root)).notes
    assert all(name in note for name in beside)
    assert as_bytes(load("text", root, endings="md,none", num_train=4).train) == b"do a", "a choice is not doubted"


def test_linked_folders_are_part_of_a_text(tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "elsewhere", {"a.txt": "learn this"})
    root = written(tmp_path / "root", {"valid.txt": "measure"})
    (root / "train").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(root)
    assert sorted(load("text", root).checksums) == ["train/a.txt", "valid.txt"]


@PER_MARK
def test_a_folder_of_words_has_the_vocabulary_of_what_is_learnt_from(tmp_path: Path, mark: str) -> None:
    root = written(tmp_path, {"train.txt": mark + TRAIN, "valid.txt": mark + VALID})
    loaded = load("text", root, unit="words", max_words=6)
    assert loaded.words == ("<unk>", "<eos>", "the", "dog", "ran", "a")
    assert spelled(loaded, loaded.test) == ["the", "dog", "<unk>", "a", "<unk>", "<eos>"]


# Tokens

LONG = "The reader reads what the reader wrote,\nzweimal für Ärzte 語 \u0000 and so on.\r\n\n" * 8
TOKENS: dict[str, Any] = {"unit": "tokens", "max_words": 300}


def in_tokens(root: Path, files: Mapping[str, str | bytes], **settings: Any) -> tuple[Text, list[int]]:
    """Return a text in tokens, and how many bytes the tokens of each part stand for."""
    loaded = load("text", written(root, files), **(TOKENS | settings))
    assert loaded.num_bytes is not None
    return loaded, [int(loaded.num_bytes[part.long()].sum()) for part in (loaded.train, loaded.test)]


@PER_MARK
def test_tokens_are_all_bytes_of_the_text_and_fewer_than_they(tmp_path: Path, mark: str) -> None:
    loaded, num_bytes = in_tokens(tmp_path, {"train.txt": mark + LONG, "valid.txt": mark + LONG[:100]})
    assert len(loaded.words) == 300
    assert num_bytes == [len(LONG.encode()), len(LONG[:100].encode())]
    visible = set(string.ascii_letters + string.punctuation)
    for part, content in ((loaded.train, LONG), (loaded.test, LONG[:100])):
        assert len(part) < 0.7 * len(content)
        assert [c for c in "".join(spelled(loaded, part)) if c in visible] == [c for c in content if c in visible]


def test_the_vocabulary_of_tokens_is_learnt_from_the_training_part_alone(tmp_path: Path) -> None:
    one, _ = in_tokens(tmp_path / "a", {"train.txt": LONG, "valid.txt": LONG[:100]})
    other, _ = in_tokens(tmp_path / "b", {"train.txt": LONG, "valid.txt": "elsewhere elsewhere " * 50})
    assert one.words == other.words
    assert torch.equal(one.train, other.train)


def test_files_of_tokens_are_made_once_for_each_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"train.txt": LONG, "valid.txt": LONG[:100]}
    first, _ = in_tokens(tmp_path, files)
    with monkeypatch.context() as without:
        without.setattr(token_files, "_make", lambda *_: pytest.fail("made again"))
        assert torch.equal(load("text", tmp_path, **TOKENS).train, first.train)
        assert torch.equal(load("text", tmp_path, num_train=5, **TOKENS).train, first.train[:5])
    assert len(in_tokens(tmp_path, files | {"train.txt": LONG + "More.\n"})[0].train) > len(first.train)
    assert not list(tmp_path.glob(".tokens/making-*"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    other = files | {"train.txt": LONG * 2}
    refused(lambda: in_tokens(tmp_path, other), "unit=tokens of text needs the package tokenizers")


def test_the_last_tenth_of_a_file_in_tokens_is_held_out(tmp_path: Path) -> None:
    for num_lines in (1, 30):
        content = "\n".join(["zweimal für Ärzte 語 " * 30] * num_lines)
        _, (train, test) = in_tokens(tmp_path / str(num_lines), {"one.txt": content})
        num_bytes = len(content.encode())
        assert train + test == num_bytes
        assert 0.9 * num_bytes / 10 - 5 < test <= num_bytes / 10
