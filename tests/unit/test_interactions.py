"""Who took what: items to draw, the split, how held-out items are ranked, and where the pairs come from."""

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import data
from data.interaction_batches import EvalUsers, InteractionBatches, ranking_sums
from data.latent import Latent
from data.leave_one_out import leave_one_out
from data.movielens import Movielens100k
from data.negative_sampling import NegativeSampler
from data.source import Interactions
from tests.data_sets import check_interactions, items_of, load, written
from tests.refusals import refused


def split(pairs: list[tuple[int, int]], num_items: int, num_negatives: int) -> Interactions:
    users, items = torch.tensor(pairs).unbind(1)
    sizes = {"num_users": int(users.max()) + 1, "num_items": num_items}
    return leave_one_out(users, items, num_negatives=num_negatives, checksums={}, **sizes)


# Items that were not taken


def test_drawn_items_are_uniform_and_may_be_all_that_are_left() -> None:
    untaken = NegativeSampler(torch.tensor([0, 0, 1]), torch.tensor([1, 3, 0]), num_users=2, num_items=6)
    random = data.generator(0)
    counts = untaken.draw(torch.zeros(1).long(), 8000, random)[0].bincount(minlength=6)
    assert counts[[1, 3]].sum() == 0
    assert ((counts[[0, 2, 4, 5]] - 2000).abs() < 200).all()
    pairs = Counter(tuple(sorted(row)) for row in untaken.draw_distinct(torch.ones(8000).long(), 2, random).tolist())
    assert set(pairs) == {(a, b) for a in range(1, 6) for b in range(a + 1, 6)}
    assert all(abs(count - 800) < 120 for count in pairs.values())
    assert sorted(untaken.draw_distinct(torch.tensor([0]), 4, random)[0].tolist()) == [0, 2, 4, 5]


# The split


def test_the_last_item_is_held_out_where_there_are_two_and_enough_others() -> None:
    pairs = [(0, 5), (0, 1), (0, 3), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)]
    content = split(pairs, num_items=6, num_negatives=3)
    check_interactions(content)
    assert content.test_items.tolist() == [3, -1, -1]
    assert items_of(content) == [{1, 5}, {2}, {0, 1, 2, 3, 4}]


def test_a_split_that_tests_nobody_is_refused() -> None:
    refused(lambda: split([(0, 0), (1, 1)], 6, 5), "no user has two items: there is none to hold out for the test")
    few = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    refused(lambda: split(few, 6, 5), "num_negatives must be at most 4", 5)
    content = split([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)], num_items=3, num_negatives=1)
    assert content.test_items.tolist() == [1, -1]
    whole: dict[str, Any] = {"batch_size": 5, "rank": 0, "world_size": 1, "seed": 0}
    refused(lambda: InteractionBatches(content, **whole), "an item for negatives", "user 1 took all 3")


# Ranking


@pytest.mark.parametrize("top", [1, 3, 10])
def test_ranking_equals_counting_and_rewards_neither_ties_nor_nan(top: int) -> None:
    scores = torch.randn(200, 21, generator=data.generator(top)).mul(4).round()  # with many ties
    scores[::9, 5], scores[::13, 0], scores[::11, 0] = math.nan, math.nan, math.inf
    hits, gains = 0, 0.0
    for held_out, *others in scores.tolist():
        place = sum(not other < held_out for other in others)
        if place < top and not math.isnan(held_out):
            hits, gains = hits + 1, gains + 1 / math.log2(place + 2)
    assert ranking_sums(scores, top).tolist() == pytest.approx([hits, gains, 200])
    assert 0 < hits < 200
    for useless in (torch.zeros(4, 101), torch.full((4, 101), math.nan), torch.zeros(0, 101)):
        assert ranking_sums(useless, top).tolist() == [0, 0, len(useless)]


# Latent factors


def test_taste_can_be_learnt_beyond_popularity() -> None:
    content = load("latent")
    users, items = next(iter(EvalUsers(content, batch_size_users=600, rank=0, world_size=1)))
    popular = content.items.bincount(minlength=400).expand(600, -1)
    chance = torch.rand(600, 400, generator=data.generator(0))
    of_each = (ranking_sums(scores[users, items])[0] for scores in (Latent().scores(), popular, chance))
    truth, popularity, guess = map(float, of_each)
    assert truth > 2 * popularity > 4 * guess


def test_a_drawing_follows_its_number_and_not_the_seed() -> None:
    tiny: dict[str, Any] = {"num_users": 30, "num_items": 40, "num_taken": 6, "num_negatives": 12}
    first, again, other = load("latent", **tiny), load("latent", seed=9, **tiny), load("latent", draw=1, **tiny)
    assert first.checksums == again.checksums != other.checksums
    assert_same(first, again)


def assert_same(one: Interactions, other: Interactions) -> None:
    for name in ("users", "items", "test_items", "test_negatives"):
        assert torch.equal(getattr(one, name), getattr(other, name))


# MovieLens, from files that the test writes

# user, film, time: user 7's latest is film 30 by the later line, and user 9 rated film 10 again last
RATINGS = [(9, 10, 4), (7, 20, 5), (9, 30, 6), (7, 50, 9), (7, 30, 9), (9, 20, 5), (9, 10, 7), (8, 40, 1)]
LINES = {
    "movielens100k": ("ml-100k/u.data", "{}\t{}\t3\t{}\n", ""),
    "movielens1m": ("ml-1m/ratings.dat", "{}::{}::3::{}\n", ""),
    "movielens20m": ("ml-20m/ratings.csv", "{},{},3.5,{}\n", "userId,movieId,rating,timestamp\n"),
}


def write(root: Path, name: str = "movielens100k", ratings: Any = RATINGS, encoding: str = "utf-8") -> Path:
    place, line, header = LINES[name]
    text = header + "".join(line.format(*rating) for rating in ratings)
    return written(root, {place: text.encode(encoding)}) / place


def read(root: Path) -> Interactions:
    return load("movielens100k", root, num_negatives=2)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # without and with a byte-order mark
@pytest.mark.parametrize("name", LINES)
def test_ratings_are_read_in_each_layout(tmp_path: Path, name: str, encoding: str) -> None:
    write(tmp_path, name, encoding=encoding)
    content = load(name, tmp_path, num_negatives=2)
    assert (content.num_users, content.num_items) == (3, 5)  # users 7, 8, 9; films 10, 20, 30, 40, 50
    assert items_of(content) == [{1, 4}, {3}, {1, 2}]
    assert content.test_items.tolist() == [2, -1, 0]
    assert list(content.checksums) == [LINES[name][0]]


def the_cache(root: Path) -> Path:
    (cache,) = set((root / "ml-100k").iterdir()) - {root / "ml-100k/u.data"}
    return cache


def test_a_cache_is_read_again_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    stat, parsed = path.stat(), read(tmp_path)
    with monkeypatch.context() as cached:
        cached.setattr(Movielens100k, "_parse", None)  # cannot be called
        assert_same(parsed, read(tmp_path))
    assert the_cache(tmp_path)
    write(tmp_path, ratings=[*RATINGS[:4], (7, 40, 9), *RATINGS[5:]])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of the same length and time
    assert read(tmp_path).test_items.tolist() == [3, -1, 0]


@pytest.mark.parametrize("content", [b"", b"torn", np.float32([0, 1])], ids=["empty", "torn", "other"])
def test_a_torn_cache_is_written_again(tmp_path: Path, content: Any) -> None:
    write(tmp_path)
    parsed, cache = read(tmp_path), the_cache(tmp_path)
    right = cache.read_bytes()
    cache.write_bytes(content) if isinstance(content, bytes) else np.save(cache, content)
    assert_same(parsed, read(tmp_path))
    assert cache.read_bytes() == right


def test_a_folder_that_cannot_be_written_goes_without_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path)
    monkeypatch.setattr("data.file_sums.os.replace", refuse)  # a superuser may write everywhere
    assert read(tmp_path).num_users == 3
    assert list(path.parent.iterdir()) == [path]
