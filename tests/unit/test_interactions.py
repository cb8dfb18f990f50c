"""Who took what: the split, the pairs that workers draw, and how held-out items are ranked."""

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.interaction_batches import EvalUsers, InteractionBatches, ranking_sums
from data.latent import Latent
from data.leave_one_out import leave_one_out
from data.movielens import Movielens1m, Movielens20m, Movielens100k
from data.negative_sampling import NegativeSampler
from data.source import Interactions

SETS = {"movielens100k": Movielens100k, "movielens1m": Movielens1m, "movielens20m": Movielens20m}
TINY = Latent(num_users=30, num_items=40, num_taken=6, num_negatives=12)


def sets_of(content: Interactions) -> list[set[int]]:
    """The training items of each user."""
    taken: list[set[int]] = [set() for _ in range(content.num_users)]
    for user, item in zip(content.users.tolist(), content.items.tolist(), strict=True):
        taken[user].add(item)
    return taken


def assert_sound(content: Interactions) -> None:
    """What `Interactions` promises, whatever the source."""
    keys = content.users.long() * content.num_items + content.items
    assert (keys.diff() > 0).all()
    assert {t.dtype for t in (content.users, content.items, content.test_items, content.test_negatives)} == {
        torch.int32
    }
    taken = sets_of(content)
    assert len(content.test_items) == len(content.test_negatives) == content.num_users
    for user, held_out in enumerate(content.test_items.tolist()):
        negatives = content.test_negatives[user].tolist()
        if held_out == -1:
            assert set(negatives) == {-1}
            continue
        assert held_out not in taken[user]
        assert len(set(negatives)) == len(negatives)
        assert set(negatives) <= set(range(content.num_items)) - taken[user] - {held_out}


# Items that were not taken


def test_untaken_items_are_numbered_as_a_list_of_them_would_be() -> None:
    random = torch.Generator().manual_seed(0)
    table = torch.rand(9, 23, generator=random) < torch.linspace(0, 1, 9).unsqueeze(1)  # nothing taken, to all
    users, items = table.nonzero().unbind(1)
    untaken = NegativeSampler(users, items.int(), num_users=9, num_items=23)
    assert untaken.counts.tolist() == (~table).sum(1).tolist()
    owners, expected = (~table).nonzero().unbind(1)
    numbers = torch.cat([torch.arange(count) for count in untaken.counts.tolist()])
    assert torch.equal(untaken.item(owners, numbers), expected)


def test_drawn_items_are_uniform() -> None:
    untaken = NegativeSampler(torch.tensor([0, 0, 1]), torch.tensor([1, 3, 0]), num_users=2, num_items=6)
    random = torch.Generator().manual_seed(0)
    counts = untaken.draw(torch.zeros(1, dtype=torch.int64), 8000, random)[0].bincount(minlength=6)
    assert counts[[1, 3]].sum() == 0
    assert ((counts[[0, 2, 4, 5]] - 2000).abs() < 200).all()
    pairs = Counter(tuple(sorted(row)) for row in untaken.draw_distinct(torch.ones(8000).long(), 2, random).tolist())
    assert set(pairs) == {(a, b) for a in range(1, 6) for b in range(a + 1, 6)}
    assert all(abs(count - 800) < 120 for count in pairs.values())


def test_distinct_items_may_be_all_that_are_left() -> None:
    untaken = NegativeSampler(torch.tensor([0, 0, 1]), torch.tensor([1, 3, 0]), num_users=2, num_items=6)
    drawn = untaken.draw_distinct(torch.tensor([0]), 4, torch.Generator().manual_seed(0))
    assert sorted(drawn[0].tolist()) == [0, 2, 4, 5]


# The split


def split(pairs: list[tuple[int, int]], num_items: int, num_negatives: int) -> Interactions:
    users, items = torch.tensor(pairs).unbind(1)
    sizes = {"num_users": int(users.max()) + 1, "num_items": num_items}
    return leave_one_out(users, items, num_negatives=num_negatives, checksums={}, **sizes)


def test_the_last_item_is_held_out_where_there_are_two_and_enough_others() -> None:
    pairs = [(0, 5), (0, 1), (0, 3), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)]
    content = split(pairs, num_items=6, num_negatives=3)
    assert_sound(content)
    assert content.test_items.tolist() == [3, -1, -1]
    assert sets_of(content) == [{1, 5}, {2}, {0, 1, 2, 3, 4}]
    assert sorted(content.test_negatives[0].tolist()) == [0, 2, 4]


def test_negatives_do_not_depend_on_anything_but_the_pairs() -> None:
    before = torch.get_rng_state()
    first, again = TINY.load(None, 1), TINY.load(None, 2)
    assert torch.equal(first.test_negatives, again.test_negatives)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 0), (1, 1)], r"^no user has two items: there is none to hold out for the test$"),
        ([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], r"^num_negatives must be at most 4, which some user .*, got 5$"),
    ],
)
def test_a_split_that_tests_nobody_is_refused(pairs: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(pairs, num_items=6, num_negatives=5)


# Training batches


def shards(content: Interactions, world_size: int, batch_size: int, epoch: int = 0, seed: int = 0, **more: Any) -> Any:
    settings = {"batch_size": batch_size, "world_size": world_size, "seed": seed, **more}
    ranks = [InteractionBatches(content, rank=rank, **settings) for rank in range(world_size)]
    assert len({batches.num_batches for batches in ranks}) == 1
    return [list(batches.epoch(epoch)) for batches in ranks]


def positives(batch: tuple[Tensor, Tensor, Tensor]) -> list[tuple[int, int]]:
    users, items, labels = batch
    return list(zip(users[labels == 1].tolist(), items[labels == 1].tolist(), strict=True))


@pytest.mark.parametrize(("world_size", "negatives"), [(1, 4), (2, 4), (3, 1), (7, 2), (4, 0)])
def test_shares_are_disjoint_complete_and_balanced(world_size: int, negatives: int) -> None:
    content, num = TINY.load(None, 0), 4
    by_rank = shards(content, world_size, num * (negatives + 1), negatives=negatives)
    num_batches = len(content.users) // (world_size * num)
    assert [len(batches) for batches in by_rank] == [num_batches] * world_size
    seen = [pair for batches in by_rank for batch in batches for pair in positives(batch)]
    assert len(seen) == len(set(seen)) == num_batches * world_size * num > len(content.users) - world_size * num
    assert set(seen) <= set(zip(content.users.tolist(), content.items.tolist(), strict=True))
    taken = sets_of(content)
    for users, items, labels in (batch for batches in by_rank for batch in batches):
        assert (users.dtype, items.dtype, labels.dtype) == (torch.int64, torch.int64, torch.float32)
        assert len(users) == len(items) == len(labels) == num * (negatives + 1)
        assert labels.sum() == num
        assert (users.view(num, -1) == users.view(num, -1)[:, :1]).all()  # each positive beside its negatives
        for user, item, label in zip(users.tolist(), items.tolist(), labels.tolist(), strict=True):
            assert (item in taken[user]) == (label == 1)


def test_a_step_draws_the_same_positives_whatever_the_world_size() -> None:
    content = TINY.load(None, 0)
    of_two, of_six = shards(content, 2, 30), shards(content, 6, 10)
    assert len(of_two[0]) == 15
    for step in range(15):
        two, six = ([pair for rank in ranks for pair in positives(rank[step])] for ranks in (of_two, of_six))
        assert two == six


def test_pairs_follow_seed_epoch_rank_and_step_alone() -> None:
    content = TINY.load(None, 0)

    def flat(**settings: int) -> list[list[int]]:
        return [items.tolist() for batches in shards(content, 2, 20, **settings) for _, items, _ in batches]

    assert flat() == flat()
    assert flat() != flat(epoch=1)
    assert flat() != flat(seed=1)
    one_user = split([(0, item) for item in range(3)], num_items=5000, num_negatives=1)
    drawn = [items[labels == 0].tolist() for rank in shards(one_user, 2, 5) for _, items, labels in rank]
    assert drawn[0] != drawn[1]


def test_an_epoch_of_pairs_resumed_in_the_middle_is_the_whole_epoch() -> None:
    batches = InteractionBatches(TINY.load(None, 0), batch_size=25, rank=1, world_size=2, seed=3)
    whole, rest = list(batches.epoch(2)), list(batches.epoch(2, start=7))
    assert len(rest) == len(whole) - 7 == 11
    for batch, again in zip(whole[7:], rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 12}, r"^batch_size must be a multiple of negatives \+ 1 = 5, got 12: take 15$"),
        ({"batch_size": 0}, r"^batch_size must be a multiple of negatives \+ 1 = 5, got 0: take 5$"),
        ({"batch_size": -5}, r"got -5: take 5$"),
        ({"negatives": -1}, r"^negatives must be at least 0, got -1$"),
        ({"rank": 2}, r"^rank must be in 0\.\.1, got 2$"),
        ({"world_size": 0}, r"^world_size must be at least 1, got 0$"),
        (
            {"batch_size": 455},
            r"^world_size \* batch_size must be at most 180 .* 4 negatives each = 900, got 2 \* 455$",
        ),
    ],
)
def test_a_setting_of_pairs_out_of_range_is_told_in_one_line(settings: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {"batch_size": 10, "rank": 0, "world_size": 2, "seed": 0}
    with pytest.raises(ValueError, match=message):
        InteractionBatches(TINY.load(None, 0), **(valid | settings))


def test_a_user_who_took_everything_has_no_negatives() -> None:
    content = split([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)], num_items=3, num_negatives=1)
    assert content.test_items.tolist() == [1, -1]
    with pytest.raises(ValueError, match=r"^every user must leave an item for negatives, user 1 took all 3$"):
        InteractionBatches(content, batch_size=5, rank=0, world_size=1, seed=0)


# Evaluation


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 7), (3, 4), (5, 100), (40, 1)])
def test_each_tested_user_is_ranked_once(world_size: int, batch_size: int) -> None:
    content = TINY.load(None, 0)
    content.test_items[::4] = -1
    settings: dict[str, Any] = {"batch_size_users": batch_size, "world_size": world_size}
    ranks = [EvalUsers(content, rank=rank, **settings) for rank in range(world_size)]
    batches = [list(users) for users in ranks]
    assert [len(listed) for listed in batches] == [users.num_batches for users in ranks]
    assert max(u.num_samples for u in ranks) - min(u.num_samples for u in ranks) <= 1
    users, items = (torch.cat(parts) for parts in zip(*(pair for listed in batches for pair in listed), strict=True))
    assert (users.dtype, items.dtype) == (torch.int64, torch.int64)
    tested = [user for user in range(30) if user % 4]
    assert users.tolist() == [[user] * 13 for user in tested]
    assert items[:, 0].tolist() == content.test_items[tested].tolist()
    assert torch.equal(items[:, 1:], content.test_negatives[tested].long())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size_users": 0}, r"^batch_size_users must be at least 1, got 0$"),
        ({"rank": -1}, r"^rank must be in 0\.\.1, got -1$"),
    ],
)
def test_a_setting_of_evaluation_out_of_range_is_told(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvalUsers(TINY.load(None, 0), **({"batch_size_users": 1, "rank": 0, "world_size": 2} | settings))


def brute_sums(scores: Tensor, top: int) -> list[float]:
    hits, gains = 0, 0.0
    for held_out, *others in scores.tolist():
        place = sum(not other < held_out for other in others)
        if place < top and not math.isnan(held_out):
            hits, gains = hits + 1, gains + 1 / math.log2(place + 2)
    return [hits, gains, len(scores)]


@pytest.mark.parametrize("top", [1, 3, 10])
def test_ranking_equals_counting(top: int) -> None:
    scores = torch.randn(200, 21, generator=torch.Generator().manual_seed(top)).mul(4).round()  # with many ties
    scores[::9, 5] = math.nan
    scores[::13, 0] = math.nan
    scores[::11, 0] = math.inf
    sums = ranking_sums(scores, top)
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx(brute_sums(scores, top))
    assert 0 < sums[0] < 200


def test_ranking_rewards_neither_ties_nor_nan() -> None:
    assert ranking_sums(torch.zeros(4, 101)).tolist() == [0, 0, 4]
    assert ranking_sums(torch.full((4, 101), math.nan)).tolist() == [0, 0, 4]
    assert ranking_sums(torch.tensor([[math.nan, 0.0]])).tolist() == [0, 0, 1]
    assert ranking_sums(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == pytest.approx([2, 1 + 1 / math.log2(3), 2])
    assert ranking_sums(torch.zeros(0, 101)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("shape", "top", "message"),
    [
        ((5,), 10, r"^scores must be \(users, 1 \+ num_negatives\), got \(5,\)$"),
        ((2, 3), 0, r"^top must be at least 1, got 0$"),
    ],
)
def test_a_ranking_of_nothing_is_refused(shape: tuple[int, ...], top: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranking_sums(torch.zeros(shape), top)


# Latent factors


def hit_ratio(content: Interactions, scores: Tensor) -> float:
    sums = sum(
        ranking_sums(scores[users, items])
        for users, items in EvalUsers(content, batch_size_users=100, rank=0, world_size=1)
    )
    assert isinstance(sums, Tensor)
    return (sums[0] / sums[2]).item()


def test_taste_can_be_learnt_beyond_popularity() -> None:
    latent = Latent()
    content = latent.load(None, 0)
    assert_sound(content)
    info = latent.info(None)
    assert (info.num_train, info.num_test) == (len(content.users), (content.test_items >= 0).sum())
    assert info.sizes == {"num_users": content.num_users, "num_items": content.num_items}
    popular = content.items.bincount(minlength=400).expand(600, -1)
    chance = torch.rand(600, 400, generator=torch.Generator().manual_seed(0))
    truth, popularity, guess = (hit_ratio(content, scores) for scores in (latent.scores(), popular, chance))
    assert truth > 2 * popularity > 4 * guess


def test_the_first_item_follows_the_softmax_of_the_scores() -> None:
    latent = Latent(num_users=4000, num_items=5, num_taken=1, strength=0, popularity=1.5, num_negatives=1)
    content = latent.load(None, 0)
    expected = latent.scores()[0].softmax(0)
    torch.testing.assert_close(content.items.bincount(minlength=5) / 4000, expected.float(), atol=0.03, rtol=0)
    second = content.test_items[content.items == expected.argmax()].bincount(minlength=5).float()
    rest = expected.clone().index_fill(0, expected.argmax(), 0)
    torch.testing.assert_close(second / second.sum(), (rest / rest.sum()).float(), atol=0.03, rtol=0)


def test_a_drawing_follows_its_number_and_not_the_seed() -> None:
    first, again, other = TINY.load(None, 0), TINY.load(None, 9), Latent(draw=1).load(None, 0)
    assert first.checksums == again.checksums != other.checksums
    assert torch.equal(first.items, again.items)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_users": 0}, r"^num_users must be an integer of at least 1, got 0$"),
        ({"num_taken": 2.0}, r"^num_taken must be an integer of at least 1, got 2\.0$"),
        ({"draw": -1}, r"^draw must be an integer of at least 0, got -1$"),
        ({"strength": -1.0}, r"^strength must be a finite number of at least 0, got -1\.0$"),
        ({"popularity": math.nan}, r"^popularity must be a finite number of at least 0, got nan$"),
        ({"num_items": 120}, r"^num_items must be at least num_taken \+ 1 \+ num_negatives = 121, got 120$"),
    ],
)
def test_a_latent_setting_out_of_range_is_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Latent(**settings)


# MovieLens, from files that the test writes

# user, film, time: user 7's latest is film 30 by the later line, and user 9 rated film 10 again last
RATINGS = [(9, 10, 4), (7, 20, 5), (9, 30, 6), (7, 50, 9), (7, 30, 9), (9, 20, 5), (9, 10, 7), (8, 40, 1)]
LINES = {
    "movielens100k": ("ml-100k/u.data", "{}\t{}\t3\t{}\n", ""),
    "movielens1m": ("ml-1m/ratings.dat", "{}::{}::3::{}\n", ""),
    "movielens20m": ("ml-20m/ratings.csv", "{},{},3.5,{}\n", "userId,movieId,rating,timestamp\n"),
}


def write_ratings(
    root: Path, name: str = "movielens100k", ratings: list[tuple[int, int, int]] = RATINGS, encoding: str = "utf-8"
) -> Path:
    place, line, header = LINES[name]
    path = root / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(header + "".join(line.format(*rating) for rating in ratings), encoding=encoding)
    return path


def assert_same(one: Interactions, other: Interactions) -> None:
    for name in ("users", "items", "test_items", "test_negatives"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def read(root: Path) -> Interactions:
    return Movielens100k(num_negatives=2).load(str(root), 0)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # without and with a byte-order mark
@pytest.mark.parametrize("name", list(SETS))
def test_ratings_are_read_in_each_layout(tmp_path: Path, name: str, encoding: str) -> None:
    path = write_ratings(tmp_path, name, encoding=encoding)
    source = SETS[name](num_negatives=2)
    content, info = source.load(str(tmp_path), 0), source.info(str(tmp_path))
    assert_sound(content)
    assert (content.num_users, content.num_items) == (3, 5)  # users 7, 8, 9; films 10, 20, 30, 40, 50
    assert list(zip(content.users.tolist(), content.items.tolist(), strict=True)) == [
        *((0, 1), (0, 4)),
        (1, 3),
        *((2, 1), (2, 2)),
    ]
    assert content.test_items.tolist() == [2, -1, 0]
    assert [len(value) for value in content.checksums.values()] == [64]
    assert list(content.checksums) == [f"{path.parent.name}/{path.name}"]
    assert info.sizes == {"num_users": 3, "num_items": 5}
    assert (info.num_train, info.num_test) == (5, 2)
    source.check(str(tmp_path))


def test_the_held_out_item_is_the_latest_of_many(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    ratings = [(int(u), int(i), int(t)) for u, i, t in random.integers(1, (20, 60, 50), (400, 3))]
    write_ratings(tmp_path, ratings=ratings)
    content = read(tmp_path)
    assert_sound(content)
    users, items = (sorted({rating[column] for rating in ratings}) for column in (0, 1))
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    for line, (user, item, time) in enumerate(ratings):
        key = users.index(user), items.index(item)
        latest[key] = max(latest.get(key, (0, 0)), (time, line))
    for user in range(len(users)):
        mine = {item: when for (owner, item), when in latest.items() if owner == user}
        held_out = max(mine, key=lambda item: mine[item])
        assert content.test_items[user] == held_out
        assert sets_of(content)[user] == set(mine) - {held_out}


def caches(root: Path) -> list[Path]:
    return sorted(path for path in (root / "ml-100k").iterdir() if path.name != "u.data")


def test_a_cache_is_written_once_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ratings(tmp_path)
    parsed = read(tmp_path)
    assert len(caches(tmp_path)) == 1
    monkeypatch.setattr(Movielens100k, "_parse", None)  # cannot be called
    assert_same(parsed, read(tmp_path))
    assert len(caches(tmp_path)) == 1


def array(values: list[list[int]], kind: str = "int32") -> np.ndarray:
    return np.array(values, dtype=kind)


FOREIGN = [
    array([[0, 1], [0, 1]], "int64"),
    array([[0, 1]]),
    array([[], []]),
    array([[1, 2], [0, 1]]),
    array([[0, 2], [0, 1]]),
    array([[0, 1, 0], [0, 1, 2]]),
    array([[0, 1], [0, 2]]),
    array([[0, 1], [0, -1]]),
    array([[0, 0], [1, 1]]),
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_cache_is_ignored_and_rewritten(tmp_path: Path, foreign: np.ndarray) -> None:
    write_ratings(tmp_path)
    parsed = read(tmp_path)
    (cache,) = caches(tmp_path)
    right = cache.read_bytes()
    with cache.open("wb") as file:
        np.save(file, foreign)
    assert_same(parsed, read(tmp_path))
    assert cache.read_bytes() == right


@pytest.mark.parametrize("kept", [0, 4, 60, 140, -1])
def test_a_torn_cache_is_ignored_and_rewritten(tmp_path: Path, kept: int) -> None:
    write_ratings(tmp_path)
    parsed = read(tmp_path)
    (cache,) = caches(tmp_path)
    right = cache.read_bytes()
    cache.write_bytes(right[:kept])
    assert_same(parsed, read(tmp_path))
    assert cache.read_bytes() == right


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = write_ratings(tmp_path)
    stat = path.stat()
    assert read(tmp_path).test_items.tolist() == [2, -1, 0]
    write_ratings(tmp_path, ratings=[*RATINGS[:4], (7, 40, 9), *RATINGS[5:]])  # of the same length
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert read(tmp_path).test_items.tolist() == [3, -1, 0]


def test_a_folder_that_cannot_be_written_goes_without_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ratings(tmp_path)

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("data.movielens.os.replace", refuse)  # a superuser may write everywhere
    assert read(tmp_path).num_users == 3
    assert caches(tmp_path) == []


WRONG = [
    ("movielens100k", "", r"input contained no data"),
    ("movielens100k", "<html>\n", r"could not convert string '<html>' to int64"),
    ("movielens100k", "1\t2\t3\t4\n1\t2\n", r"invalid column index"),
    ("movielens100k", "1\tx\t3\t4\n", r"could not convert string 'x' to int64"),
    ("movielens100k", "1\t2\t3\t4.5\n", r"could not convert string '4\.5' to int64"),
    ("movielens20m", "1,2,3.5,4\n", r"its first line is not userId,movieId,rating,timestamp"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_named_with_fault_and_remedy(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write_ratings(tmp_path, name)
    path.write_text(text)
    for entry in (lambda: SETS[name]().load(str(tmp_path), 0), lambda: SETS[name]().check(str(tmp_path))):
        with pytest.raises(ValueError, match=message) as raised:
            entry()
        reported = str(raised.value)
        assert reported.startswith(f"{path} is not a file of MovieLens ratings (")
        assert reported.endswith(f": remove {path.parent} and run python -m data.prepare {name} --root {tmp_path}")
        assert "\n" not in reported


def test_a_missing_root_or_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^dataset movielens1m needs a data root, got None: name .* holds ml-1m$"):
        Movielens1m().check(None)
    with pytest.raises(ValueError, match=r"u\.data cannot be read \(No such file.*: run python -m data\.prepare movie"):
        Movielens100k().check(str(tmp_path))
    with pytest.raises(ValueError, match=r"^num_negatives must be an integer of at least 1, got 0$"):
        Movielens20m(num_negatives=0)


@pytest.mark.real_data
def test_the_official_ratings_are_read() -> None:
    root = os.environ.get("MICRO_DATA", "")
    if not (Path(root) / "ml-100k" / "u.data").is_file():
        pytest.skip("MICRO_DATA names no folder with ml-100k in it")
    content = Movielens100k().load(root, 0)
    assert_sound(content)
    assert (content.num_users, content.num_items, len(content.users)) == (943, 1682, 99057)
    assert (content.test_items >= 0).all()
    popularity = content.items.bincount(minlength=1682).expand(943, -1)
    assert 0.3 < hit_ratio(content, popularity) < 0.5
