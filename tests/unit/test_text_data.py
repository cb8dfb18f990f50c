"""What every text, its spelling and its batches promise."""

import itertools
import os
import string
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import data
from data import text, text_batches
from data.character_vocabulary import MAX_LENGTH
from data.source import DatasetInfo, Text

TRAIN = "the cat saw the dog \n the dog ran\n\n a <unk> ran\n"
VALID = "the dog saw a Bird"
NUM_WORDS = 50
Pairs = list[tuple[Tensor, Tensor]]


def numbered(num: int) -> Tensor:
    """A text in which every word tells its place."""
    return torch.arange(num)


def drawn(num: int) -> Tensor:
    return torch.randint(NUM_WORDS, (num,), generator=data.generator(1))


def load(name: str, **settings: Any) -> Text:
    loaded = data.load(name, **settings)
    assert isinstance(loaded, Text)
    return loaded


def text_ranks(tokens: Tensor, world_size: int, **settings: Any) -> list[data.TextBatches]:
    return [data.TextBatches(tokens, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def masked_ranks(tokens: Tensor, world_size: int, **changes: Any) -> list[data.MaskedBatches]:
    settings = {"num_words": NUM_WORDS, "mask_word": 0, "batch_size": 2, "sequence_length": 5, "seed": 0} | changes
    return [data.MaskedBatches(tokens, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def assert_equal(first: Iterable[tuple[Tensor, ...]], second: Iterable[tuple[Tensor, ...]]) -> None:
    for left, right in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# Batches to read on from


@pytest.mark.parametrize(
    ("num", "world_size", "batch_size", "length"), [(103, 1, 4, 5), (100, 3, 2, 4), (64, 8, 1, 7), (21, 2, 5, 1)]
)
def test_the_ranks_columns_are_the_text_without_overlap(
    num: int, world_size: int, batch_size: int, length: int
) -> None:
    ranks = text_ranks(numbered(num), world_size, batch_size=batch_size, sequence_length=length)
    column = num // (world_size * batch_size)
    steps = (column - 1) // length
    assert [batches.num_batches for batches in ranks] == [steps] * world_size
    read = torch.cat([torch.cat([inputs for inputs, _ in batches.epoch(0)], dim=1) for batches in ranks])
    expected = numbered(num)[: column * world_size * batch_size].view(-1, column)[:, : steps * length]
    assert torch.equal(read, expected)


def test_targets_are_the_inputs_one_place_further_on() -> None:
    for inputs, targets in text_ranks(numbered(90), 2, batch_size=3, sequence_length=4)[1].epoch(0):
        assert inputs.shape == targets.shape == (3, 4)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)


def test_a_step_reads_the_same_words_whatever_the_world_size() -> None:
    of_two = [batches.epoch(0) for batches in text_ranks(numbered(200), 2, batch_size=6, sequence_length=3)]
    of_six = [batches.epoch(0) for batches in text_ranks(numbered(200), 6, batch_size=2, sequence_length=3)]
    for two, six in zip(zip(*of_two, strict=True), zip(*of_six, strict=True), strict=True):
        assert torch.equal(torch.cat([inputs for inputs, _ in two]), torch.cat([inputs for inputs, _ in six]))


@pytest.mark.parametrize(
    "make", [lambda: text_ranks(drawn(120), 2, batch_size=2, sequence_length=4), lambda: masked_ranks(drawn(120), 2)]
)
@pytest.mark.parametrize("start", [0, 2, 5, 99])
def test_an_epoch_resumed_in_the_middle_is_the_whole_epoch(make: Any, start: int) -> None:
    for batches in make():
        whole = list(batches.epoch(3))
        assert len(whole) == batches.num_batches >= 5
        assert_equal(whole[start:], batches.epoch(3, start=start))


def test_what_is_done_to_a_batch_leaves_the_text_alone() -> None:
    tokens = numbered(60)
    (batches,) = text_ranks(tokens, 1, batch_size=2, sequence_length=4)
    for inputs, targets in batches.epoch(0):
        inputs.zero_()
        targets.zero_()
    assert torch.equal(tokens, numbered(60))
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in batches.epoch(1))


# Batches to guess words in


@pytest.mark.parametrize(("num", "world_size"), [(120, 1), (123, 3), (90, 9)])
def test_masked_shares_are_disjoint_equal_and_leave_out_the_tail_only(num: int, world_size: int) -> None:
    ranks = masked_ranks(numbered(num), world_size, num_words=num)
    steps = num // 5 // (world_size * 2)
    seen = [segment for batches in ranks for segment in batches.indices(4).flatten().tolist()]
    assert [batches.num_batches for batches in ranks] == [steps] * world_size
    assert len(seen) == len(set(seen)) == steps * world_size * 2
    assert set(seen) <= set(range(num // 5))
    for batches in ranks:
        for chosen, (inputs, targets) in zip(batches.indices(4), batches.epoch(4), strict=True):
            segments = numbered(num)[: num // 5 * 5].view(-1, 5)[chosen]
            assert torch.equal(torch.where(targets == -100, inputs, targets), segments)


@pytest.mark.parametrize("length", [1, 2, 20, 50])
def test_each_segment_is_asked_the_same_number_of_places_and_never_none(length: int) -> None:
    for _, targets in masked_ranks(drawn(1000), 1, sequence_length=length)[0].epoch(0):
        assert ((targets != -100).sum(dim=1) == max(1, round(0.15 * length))).all()


def test_masks_hide_replace_and_keep_at_their_rates_and_at_every_place_alike() -> None:
    num, length, mask = 60_000, 20, NUM_WORDS  # a mask that is no word of the text
    settings = {"num_words": NUM_WORDS + 1, "mask_word": mask, "batch_size": 100, "sequence_length": length}
    inputs, targets = (
        torch.cat(part) for part in zip(*masked_ranks(drawn(num), 1, **settings)[0].epoch(0), strict=True)
    )
    asked = targets != -100
    shown, right = inputs[asked], targets[asked]
    total, random = len(right), 1 / (NUM_WORDS + 1)  # a random word may be the mask or the right one
    assert total == 9000
    assert _likely((shown == mask).sum().item(), total, 0.8 + 0.1 * random)
    assert _likely((shown == right).sum().item(), total, 0.1 + 0.1 * random)
    others = shown[(shown != mask) & (shown != right)]
    assert others.unique().tolist() == list(range(NUM_WORDS))
    assert all(_likely(count, num // length, 3 / length) for count in asked.sum(dim=0).tolist())


def test_masks_and_order_follow_seed_epoch_and_rank() -> None:
    def first(rank: int = 0, epoch: int = 0, seed: int = 0) -> Tensor:
        tokens = torch.ones(400, dtype=torch.int64)  # all segments alike, so that only the masks can differ
        return next(masked_ranks(tokens, 2, sequence_length=20, batch_size=4, seed=seed)[rank].epoch(epoch))[1]

    assert torch.equal(first(), first())
    assert not torch.equal(first(), first(rank=1))
    assert not torch.equal(first(), first(epoch=1))
    assert not torch.equal(first(), first(seed=1))
    (batches,), (other,) = masked_ranks(drawn(400), 1), masked_ranks(drawn(400), 1, seed=1)
    assert not torch.equal(batches.indices(0), batches.indices(1))
    assert not torch.equal(batches.indices(0), other.indices(0))


# Evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3, 40])
def test_eval_columns_ask_the_same_at_every_world_size(world_size: int) -> None:
    num, length = 1000, 7
    ranks = [
        data.EvalColumns(numbered(num), num_columns=32, sequence_length=length, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    batches = [list(rank) for rank in ranks]
    pairs = Counter(pair for rank in batches for pair in _pairs(rank))
    assert pairs == Counter((word, word + 1) for word in range(992) if word % 31 != 30)
    assert [len(of_rank) for of_rank in batches] == [rank.num_batches for rank in ranks]
    assert [sum(inputs.numel() for inputs, _ in of_rank) for of_rank in batches] == [rank.num_samples for rank in ranks]
    assert {len(of_rank) for of_rank in batches} == ({0, 5} if world_size == 40 else {5})
    for of_rank in batches:
        assert [inputs.shape[1] for inputs, _ in of_rank] in ([], [7, 7, 7, 7, 2])
        for (inputs, _), (later, _) in itertools.pairwise(of_rank):
            assert torch.equal(inputs[:, -1] + 1, later[:, 0])  # read on where the last batch stopped


@pytest.mark.parametrize("world_size", [2, 3, 40])
def test_eval_masks_are_the_same_at_every_world_size(world_size: int) -> None:
    settings: dict[str, Any] = {"num_words": NUM_WORDS, "mask_word": 0, "batch_size": 4, "sequence_length": 10}
    tokens = drawn(163)
    ranks = [data.EvalMasked(tokens, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]
    (alone,) = [data.EvalMasked(tokens, rank=0, world_size=1, **settings)]
    for part in (0, 1):
        together = torch.cat([batch[part] for rank in ranks for batch in rank])
        assert torch.equal(together, torch.cat([batch[part] for batch in alone]))
    assert [len(list(rank)) for rank in ranks] == [rank.num_batches for rank in ranks]
    assert sum(rank.num_samples for rank in ranks) == alone.num_samples == 16 * 2
    inputs, targets = (torch.cat(part) for part in zip(*alone, strict=True))
    assert (targets != -100).sum() == alone.num_samples
    assert torch.equal(torch.where(targets == -100, inputs, targets), tokens[:160].view(16, 10))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("TextBatches", {"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        ("TextBatches", {"rank": 2}, r"rank must be in 0\.\.1, got 2"),
        ("TextBatches", {"sequence_length": 25}, r"\(sequence_length \+ 1\) must be at most the 100 words .*, got 104"),
        ("TextBatches", {"tokens": torch.ones(100)}, r"tokens must be \(num,\) int64, got \(100,\) torch\.float32"),
        ("MaskedBatches", {"sequence_length": 26}, r"sequence_length must be at most the 100 words .*, got 104"),
        ("MaskedBatches", {"mask_word": 100}, r"mask_word must be in 0\.\.99, got 100"),
        ("MaskedBatches", {"num_words": 99}, r"tokens must be in 0\.\.98, got 0\.\.99"),
        ("EvalColumns", {"num_columns": 51}, r"2 \* num_columns must be at most the 100 words of the text, got 102"),
        ("EvalColumns", {"world_size": 0}, r"world_size must be at least 1, got 0"),
        ("EvalMasked", {"sequence_length": 101}, r"sequence_length must be at most the 100 words of the text, got 101"),
    ],
)
def test_a_batch_setting_out_of_range_is_told_in_one_line(kind: str, changes: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"tokens": numbered(100), "sequence_length": 5, "rank": 0, "world_size": 2} | changes
    settings |= {} if kind == "EvalColumns" else {"batch_size": 2} | changes
    settings |= {"num_words": 100, "mask_word": 0} | changes if "Masked" in kind else {}
    settings |= {"seed": 0} if kind == "MaskedBatches" else {}
    with pytest.raises(ValueError, match=message) as raised:
        getattr(data, kind)(**settings)
    assert "\n" not in str(raised.value)


# Vocabulary and spelling


def test_a_vocabulary_is_by_frequency_then_alphabet_after_the_special_words() -> None:
    assert text.vocabulary(["b", "a", "c", "b", "a", "z"]) == ("<unk>", "<eos>", "a", "b", "c", "z")
    assert text.vocabulary(["b", "<eos>", "c", "b", "<unk>", "a"], 4) == ("<unk>", "<eos>", "b", "a")
    assert (text.SPECIAL[text.UNKNOWN], text.SPECIAL[text.END]) == ("<unk>", "<eos>")


def test_words_can_be_read_back_from_their_spelling() -> None:
    words = ("<unk>", "a", "Größe", "naïve", "漢字")
    letters, characters = data.characters_of_words(words), sorted(set("".join(words)))
    assert letters.shape == (5, 7)
    assert letters.dtype == torch.int64
    assert letters.max() == 2 + len(characters)
    for word, row in zip(words, letters.tolist(), strict=True):
        end = row.index(2)
        assert row[0] == 1
        assert "".join(characters[number - 3] for number in row[1:end]) == word
        assert row[end + 1 :] == [0] * (6 - end)


def test_a_long_word_keeps_its_first_characters() -> None:
    letters = data.characters_of_words(["ab", "a" * 63, "a" * 63 + "b"])
    assert letters.shape == (3, MAX_LENGTH)
    assert torch.equal(letters[1], letters[2])
    assert letters[2].tolist() == [1, *[3] * 63, 2]


# Texts from files that the test writes


def write(root: Path, folder: str = "wikitext-2", name: str = "wiki.{}.tokens", **splits: str) -> Path:
    (root / folder).mkdir(exist_ok=True)
    for split, content in ({"train": TRAIN, "valid": VALID, "test": "a cat\n"} | splits).items():
        (root / folder / name.format(split)).write_bytes(content.encode())
    return root / folder


@pytest.mark.parametrize(
    ("dataset", "folder", "name"),
    [
        ("wikitext2", "wikitext-2", "wiki.{}.tokens"),
        ("wikitext2", "wikitext-2", "{}.txt"),
        ("ptb", "ptb", "ptb.{}.txt"),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])  # of the byte order
def test_a_text_is_its_words_with_an_end_after_every_line(
    tmp_path: Path, dataset: str, folder: str, name: str, mark: str
) -> None:
    write(tmp_path, folder, name, train=mark + TRAIN, valid=mark + VALID)
    loaded = load(dataset, root=str(tmp_path), test="valid")
    assert _words(loaded, loaded.train) == TRAIN.replace("\n", " <eos> ").split()
    assert _words(loaded, loaded.test) == ["the", "dog", "saw", "a", "<unk>", "<eos>"]
    assert loaded.words[:5] == ("<unk>", "<eos>", "the", "dog", "ran")
    assert sorted(loaded.checksums) == [f"{folder}/{name.format(split)}" for split in ("train", "valid")]
    assert all(len(checksum) == 64 for checksum in loaded.checksums.values())
    _assert_consistent(loaded, data.info(dataset, str(tmp_path), test="valid"))
    data.check(dataset, str(tmp_path))


def test_the_default_test_is_valid_of_wikitext2_and_test_of_ptb(tmp_path: Path) -> None:
    for dataset, folder, name in (("wikitext2", "wikitext-2", "wiki.{}.tokens"), ("ptb", "ptb", "ptb.{}.txt")):
        write(tmp_path, folder, name)
        assert len(load(dataset, root=str(tmp_path)).test) == (6 if dataset == "wikitext2" else 3)


def test_settings_of_a_text_do_what_they_say(tmp_path: Path) -> None:
    write(tmp_path, train="The the THE b b a\n", valid="the B \n")

    def reported(**settings: Any) -> Text:
        loaded = load("wikitext2", root=str(tmp_path), **settings)
        _assert_consistent(loaded, data.info("wikitext2", str(tmp_path), **settings))
        return loaded

    assert reported(lower=True).words == ("<unk>", "<eos>", "the", "b", "a")
    assert reported(max_words=3).words == ("<unk>", "<eos>", "b")
    assert reported(num_train=2, num_test=1).words == ("<unk>", "<eos>", "The", "the")
    assert reported(num_train=2, num_test=1).test.tolist() == [3]
    swapped = reported(train="valid", test="train")
    assert _words(swapped, swapped.test) == ["<unk>", "the", *["<unk>"] * 4, "<eos>"]


def test_only_line_ends_end_lines(tmp_path: Path) -> None:
    write(tmp_path, train="a\r\nb c\x0cd\u2028e\x85f\n")
    loaded = load("wikitext2", root=str(tmp_path))
    assert _words(loaded, loaded.train) == ["a", "<eos>", "b", "c", "d", "e", "f", "<eos>"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"",
            r"wiki\.train\.tokens holds no words: put wiki\.\{train,valid,test\}\.tokens or \{train,valid,test\}\.txt",
        ),
        (b"\n \n", r"wiki\.train\.tokens holds no words"),
        (b"ab \xff\xfe", r"wiki\.train\.tokens is not text in UTF-8 \(byte 3 is wrong\)"),
        ("aé".encode()[:-1], r"is not text in UTF-8 \(byte 1 is wrong\)"),
        (None, r"wiki\.train\.tokens cannot be read \(No such file or directory\)"),
    ],
)
def test_a_torn_file_names_fault_and_remedy(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = write(tmp_path) / "wiki.train.tokens"
    path.unlink() if content is None else path.write_bytes(content)
    for entry in (load, data.check, data.info):
        with pytest.raises(ValueError, match=message) as raised:
            entry("wikitext2", root=str(tmp_path))
        assert str(raised.value).endswith("or run python -m data.prepare wikitext2")
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        ("wikitext2", {}, r"wikitext-2 is not a folder: put wiki\..* or run python -m data\.prepare wikitext2"),
        ("ptb", {}, r"ptb is not a folder: put ptb\..* or run python -m data\.prepare ptb"),
        ("ptb", {"root": None}, r"dataset ptb needs a data root, got None: name the folder that holds ptb"),
        ("wikitext2", {"train": "dev"}, r"train of wikitext2 must be one of train, valid, test, got 'dev'"),
        ("ptb", {"train": "test"}, r"train and test of ptb must be different splits, got 'test' for both"),
        ("wikitext2", {"lower": 1}, r"lower of wikitext2 must be true or false, got 1"),
        ("wikitext2", {"max_words": 2}, r"max_words of wikitext2 must be a whole number of at least 3, got 2"),
        ("manuals", {"num_test": 0}, r"num_test of manuals must be a whole number of at least 1, got 0"),
        (
            "manuals_bytes",
            {"max_words": 9},
            r"dataset 'manuals_bytes' allows only num_train, num_test, got 'max_words'",
        ),
        ("manuals", {"lower": True}, r"dataset 'manuals' allows only max_words, num_train, num_test, got 'lower'"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, dataset: str, settings: dict[str, Any], message: str) -> None:
    for entry in (load, data.check, data.info):
        with pytest.raises(ValueError, match=message) as raised:
            entry(dataset, **({"root": str(tmp_path)} | settings))
        assert "\n" not in str(raised.value)


# Texts without a file, and real ones


def test_manuals_need_no_file_and_test_on_nothing_learned() -> None:
    loaded = load("manuals", seed=1)
    data.check("manuals")
    _assert_consistent(loaded, data.info("manuals"))
    assert len(loaded.words) == 2000
    assert 0.05 < len(loaded.test) / len(loaded.train) < 0.2
    assert not set("".join(loaded.words)) & set(string.ascii_uppercase)
    again = load("manuals", seed=2)
    assert torch.equal(loaded.train, again.train)
    assert loaded.checksums == again.checksums
    whole = load("manuals", max_words=None)
    assert not (_paragraphs(whole, whole.train) & _paragraphs(whole, whole.test))


def test_manuals_by_bytes_are_text_and_test_on_nothing_learned() -> None:
    loaded = load("manuals_bytes", seed=1)
    data.check("manuals_bytes")
    assert data.info("manuals_bytes").num_train == len(loaded.train)
    assert loaded.train.dtype == torch.uint8
    assert len(loaded.words) == 256
    train, test = (bytes(part.tolist()).decode().split("\n\n") for part in (loaded.train, loaded.test))
    assert not (set(train) & set(test)) - {""}
    assert 0.05 < len(test) / len(train) < 0.2
    assert torch.equal(load("manuals_bytes", num_train=100).train, loaded.train[:100])


def test_manuals_without_topics_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"dataset manuals needs Python's help topics .*: install Python's pydoc_data"):
        data.check("manuals")


def test_a_text_makes_batches_of_every_kind() -> None:
    loaded = load("manuals", num_train=4000, num_test=1000)
    place: dict[str, Any] = {"rank": 1, "world_size": 2, "sequence_length": 16}
    words: dict[str, Any] = {"num_words": len(loaded.words), "mask_word": data.UNKNOWN}
    assert next(data.TextBatches(loaded.train, batch_size=4, **place).epoch(0))[0].shape == (4, 16)
    assert next(data.MaskedBatches(loaded.train, batch_size=4, seed=0, **words, **place).epoch(0))[0].shape == (4, 16)
    assert next(iter(data.EvalColumns(loaded.test, **place)))[0].shape == (text_batches.NUM_COLUMNS // 2, 16)
    assert next(iter(data.EvalMasked(loaded.test, **words, **place)))[0].shape == (31, 16)


@pytest.mark.real_data
def test_real_wikitext2_is_whole() -> None:
    root = os.environ.get("MICRO_DATA")
    if not root or not (Path(root) / "wikitext-2").is_dir():
        pytest.skip("MICRO_DATA names no folder that holds wikitext-2")
    settings: dict[str, Any] = {"train": "valid", "test": "test"}  # a copy may lack the large split
    loaded = load("wikitext2", root=root, **settings)
    assert (len(loaded.train), len(loaded.test)) == (217_646, 245_569)
    _assert_consistent(loaded, data.info("wikitext2", root, **settings))


# What these tests share


def _likely(count: float, total: int, rate: float) -> bool:
    """Whether a count is within five standard deviations of a binomial's mean."""
    return abs(count - total * rate) < 5 * (total * rate * (1 - rate)) ** 0.5


def _pairs(batches: Pairs) -> list[tuple[int, int]]:
    return [
        pair
        for inputs, targets in batches
        for pair in zip(*(x.flatten().tolist() for x in (inputs, targets)), strict=True)
    ]


def _words(loaded: Text, tokens: Tensor) -> list[str]:
    return [loaded.words[number] for number in tokens.tolist()]


def _paragraphs(loaded: Text, tokens: Tensor) -> set[str]:
    return set(" ".join(_words(loaded, tokens)).split("<eos>")) - {"", " "}


def _assert_consistent(loaded: Text, sizes: DatasetInfo) -> None:
    letters = data.characters_of_words(loaded.words)
    assert sizes.kind == "text"
    assert sizes.sizes == {
        "num_words": len(loaded.words),
        "num_characters": letters.max() + 1,
        "word_length": letters.shape[1],
    }
    assert len(loaded.words) == len(set(loaded.words)) == len(letters)
    assert loaded.words[:2] == ("<unk>", "<eos>")
    for tokens, num in ((loaded.train, sizes.num_train), (loaded.test, sizes.num_test)):
        assert tokens.dtype == torch.int64
        assert tokens.shape == (num,)
        assert tokens.min() >= 0
        assert tokens.max() < len(loaded.words)
    assert loaded.checksums


# A folder of text


def written(folder: Path, **files: bytes) -> str:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def test_a_folder_of_bytes_is_cut_at_the_last_tenth_of_each_file(tmp_path: Path) -> None:
    first, second = bytes(range(100)), "zwei für".encode() * 5
    root = written(tmp_path, a_txt=first, inner__b_md=second, c_png=b"no text", empty_txt=b"")
    loaded = load("text", root=root)
    cut = len(second) - len(second) // 10
    assert bytes(loaded.train.tolist()) == first[:90] + second[:cut]
    assert bytes(loaded.test.tolist()) == first[90:] + second[cut:]
    assert loaded.train.dtype == torch.uint8
    assert len(loaded.words) == 256
    assert set(loaded.checksums) == {"a.txt", "inner/b.md"}
    assert data.info("text", root).num_train == 90 + cut


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
    ],
)
def test_whole_words_of_names_and_folders_tell_the_splits(
    tmp_path: Path, train: list[str], test: list[str], unused: list[str]
) -> None:
    contents = {name: f"{name:30}".encode() for name in [*train, *test, *unused, ".train.txt", ".git/train.txt"]}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    loaded = load("text", root=str(tmp_path))
    used = sorted([*train, *test] or unused)
    assert sorted(loaded.checksums) == used
    assert sorted(loaded.unused) == sorted(unused if train else [])
    assert bool(data.info("text", str(tmp_path)).notes) == bool(train and unused)
    expected = [[contents[name] for name in part] for part in (train, test)]
    if not train:
        expected = [[contents[name][:27] for name in used], [contents[name][27:] for name in used]]
    assert [bytes(part.tolist()) for part in (loaded.train, loaded.test)] == [b"".join(part) for part in expected]


def test_a_test_file_without_one_to_learn_from_is_noted(tmp_path: Path) -> None:
    root = written(tmp_path, test_txt=b"measure this", novel_txt=b"learn this")
    (note,) = data.info("text", root).notes
    assert "none of train" in note
    assert len(load("text", root=root).test) == 2  # a tenth of each


def test_a_folder_of_one_split_and_a_name_of_another_are_told_in_one_line(tmp_path: Path) -> None:
    root = written(tmp_path, train__test_txt=b"which?", train__a_txt=b"learn this", valid_txt=b"measure")
    with pytest.raises(ValueError, match=r"train/test\.txt is of test and of train") as raised:
        data.check("text", root)
    assert "\n" not in str(raised.value)


def test_linked_folders_are_part_of_a_text(tmp_path: Path) -> None:
    elsewhere = Path(written(tmp_path / "elsewhere", a_txt=b"learn this"))
    root = tmp_path / "root"
    written(root, valid_txt=b"measure")
    (root / "train").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(root)
    assert sorted(load("text", root=str(root)).checksums) == ["train/a.txt", "valid.txt"]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_folder_of_words_has_the_vocabulary_of_what_is_learnt_from(tmp_path: Path, mark: str) -> None:
    root = written(tmp_path, train_txt=(mark + TRAIN).encode(), valid_txt=(mark + VALID).encode())
    loaded = load("text", root=root, unit="words", max_words=6)
    assert loaded.words[:2] == ("<unk>", "<eos>")
    assert len(loaded.words) == 6
    expected = [word if word in loaded.words else "<unk>" for word in [*VALID.split(), "<eos>"]]
    assert [loaded.words[word] for word in loaded.test.tolist()] == expected
    assert {"<unk>", "the"} <= set(expected)


def test_windows_of_bytes_are_numbers_of_words() -> None:
    tokens = torch.arange(40, dtype=torch.uint8)
    (first, targets), *_ = data.TextBatches(tokens, batch_size=2, sequence_length=5, rank=0, world_size=2).epoch(0)
    assert first.dtype == targets.dtype == torch.int64
    assert first.tolist() == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    assert targets[0].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "letters"}, "unit of text must be one of bytes, words, tokens, got 'letters'"),
        ({"endings": ""}, "endings of text must be endings of names between commas, got ''"),
        ({"max_words": 100}, "max_words of text is for words, got 100 for bytes"),
        ({"num_train": 0}, "num_train of text must be a whole number of at least 1, got 0"),
        ({"endings": "rst"}, "has no file of text that ends in .rst: set endings"),
        ({"unit": "words"}, "is not text in UTF-8"),
    ],
)
def test_a_folder_that_does_not_fit_is_told_in_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    root = written(tmp_path, a_txt=b"\xff\xfe some text")
    with pytest.raises(ValueError, match=message) as raised:
        data.check("text", root, **settings)
    assert "\n" not in str(raised.value)


def test_a_folder_of_text_must_be_named() -> None:
    with pytest.raises(ValueError, match="dataset text needs a root"):
        data.check("text")
    with pytest.raises(ValueError, match="is not a folder"):
        data.check("text", "/nowhere/at/all")
