"""A rank that stands still is told from one that computes, by beats, processor time and a clock that the test moves."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from experiments.launching.process_state import ProcessState, process_state
from experiments.launching.watching.beats import Beat
from experiments.launching.watching.stalls import Seen, Stall, StallRules

LIMIT_S = 100.0  # stands still: 20 s; on another host: 50 s; missed: 80 s


def beat(rank: int, number: float, **more: object) -> Beat:
    given = {
        "rank": rank,
        "host": "here",
        "pid": 100 + rank,
        "started": 0,
        "number": int(number),
        "activity": "step 7",
        "activity_s": 1.0,
        "place": f"loop.py:{rank} in step",
        "collective": None,
        "collective_s": 0.0,
        "num_collectives": 10,
    }
    return Beat(**{**given, **more})  # type: ignore[arg-type]


def works(rank: int, now: float) -> Seen:
    return Seen(beat(rank, now), ProcessState("R", 1, int(100 * now), 0))


def waits(rank: int, now: float, *, since: float = 0.0, began: int = 11) -> Seen:
    waiting = beat(rank, now, collective="all_reduce", collective_s=max(now - since, 0.0), num_collectives=began)
    return Seen(waiting, ProcessState("S", 1, int(now), 0))


def stands(rank: int, now: float, *, letter: str = "T", since: float = 0.0) -> Seen:
    return Seen(beat(rank, min(now, since)), ProcessState(letter, 1, 5, 0))


def keeps_the_lock(rank: int, now: float) -> Seen:
    """Native code that computes and keeps the interpreter's lock: no beats, but processor time."""
    return Seen(beat(rank, 0), ProcessState("R", 1, int(100 * now), 0))


def starved(rank: int, now: float) -> Seen:
    """A process that an overloaded machine lets run once in 15 s."""
    return Seen(beat(rank, 0), ProcessState("R", 1, int(now / 15), 0))


def vanished(rank: int, now: float) -> Seen:
    return Seen(beat(rank, 0, host="there"), None)


def watch(ranks: Iterable[Callable[[int, float], Seen]], until: float = 400.0) -> tuple[float, Stall] | None:
    """Look once in two seconds; return when a rank was blamed, and which."""
    rules, now, looks = StallRules(LIMIT_S), 0.0, list(ranks)
    while now <= until:
        found = rules.look(now, {rank: look(rank, now) for rank, look in enumerate(looks)})
        if found:
            return now, found
        now += 2
    return None


@pytest.mark.parametrize(
    ("ranks", "rank", "within", "words"),
    [
        ([waits, stands], 1, (20, 22), "stood still for 20 s (stopped by a signal), last seen in step 7"),
        ([stands, waits], 0, (20, 22), "at loop.py:0 in step; rank 1 waited in all_reduce for 20 s"),
        (
            [stands, works],
            0,
            (20, 22),
            "stood still for 20 s (stopped by a signal), last seen in step 7, at loop.py:0 in step",
        ),
        (
            [waits, lambda rank, now: stands(rank, now, letter="D")],
            1,
            (20, 22),
            "stood still for 20 s, last seen in step 7",
        ),
        (
            [waits, lambda rank, now: stands(rank, now, letter="S")],
            1,
            (20, 22),
            "stood still for 20 s, last seen in step 7",
        ),
        ([waits, vanished], 1, (50, 52), "stood still for 50 s on there, last seen in step 7"),
        ([waits, works, waits], 1, (80, 82), "did not reach the collective of the others: it was in step 7"),
        ([waits, keeps_the_lock], 1, (80, 82), "rank 0 waited in all_reduce for 80 s"),
        ([waits, lambda rank, now: stands(rank, now, letter="t")], 1, (80, 82), "did not reach the collective"),
        ([waits, lambda rank, now: waits(rank, now, began=9)], 1, (80, 82), "is not the collective of the others"),
    ],
)
def test_a_rank_that_stands_still_or_is_missed_is_named(
    ranks: list[Callable[[int, float], Seen]], rank: int, within: tuple[float, float], words: str
) -> None:
    found = watch(ranks)
    assert found is not None
    when, stall = found
    assert stall.rank == rank
    assert within[0] <= when <= within[1]
    assert words in stall.message()


@pytest.mark.parametrize(
    "ranks",
    [
        [works, works],
        [keeps_the_lock, keeps_the_lock],
        [starved, starved],
        [lambda rank, now: stands(rank, now, letter="t"), works],
        [waits, waits],  # a slow link: whether it is too slow, the time-out of the collective says
        [lambda rank, now: waits(rank, now, since=now - now % 70), works],
        [works],
    ],
    ids=["computing", "in native code", "starved", "in a debugger", "all wait", "new waits", "alone"],
)
def test_a_rank_that_works_is_not_blamed_however_long_it_takes(ranks: list[Callable[[int, float], Seen]]) -> None:
    assert watch(ranks) is None


def test_a_watcher_that_was_stopped_itself_starts_anew() -> None:
    rules = StallRules(LIMIT_S)
    for now in (0.0, 2.0, 4.0, 500.0, 502.0):
        assert rules.look(now, {0: stands(0, now), 1: works(1, now)}) is None


def test_a_rank_that_ended_or_started_again_is_not_blamed() -> None:
    rules = StallRules(LIMIT_S)
    for now in range(0, 100, 2):
        seen = {0: works(0, now)} | ({1: stands(1, now)} if now < 10 else {})
        assert rules.look(now, seen) is None
    again = stands(1, 0)
    for now in range(100, 118, 2):
        assert rules.look(now, {0: works(0, now), 1: replace(again, beat=replace(again.beat, pid=7))}) is None


def test_the_kernel_says_whether_a_process_is_stopped() -> None:
    own = process_state(os.getpid())
    assert own is not None
    assert (own.letter, own.parent) == ("R", os.getppid())
    assert process_state(2**22 + 1) is None
