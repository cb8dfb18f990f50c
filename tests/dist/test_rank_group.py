"""A group of ranks calls one function at once; the rank that failed first is named, in bounded time."""

import os
import time
from pathlib import Path

import pytest

from experiments.launching.failures import Kind, RankFailure
from experiments.launching.rank_group import RankGroup
from tests.dist.rank_functions import add, add_but_one
from tests.waiting import LIMIT_S, is_alive, wait_until

pytestmark = pytest.mark.dist


def test_ranks_answer_in_their_order_and_end_with_the_context() -> None:
    with RankGroup(2, env={"OMP_NUM_THREADS": "1"}) as ranks:
        ranks.send(add, 2.0)  # before they have met
        ranks.send(os.getenv, "RANK")
        assert ranks.receive(LIMIT_S) == [4.0] * 2
        assert ranks.receive(LIMIT_S) == ["0", "1"]
        pids = ranks.call(os.getpid)
        log = Path(ranks.call(os.readlink, "/proc/self/fd/1")[0])
        assert log.exists()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the ranks")
    assert not log.parent.exists()


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", Kind.ERROR, "ValueError: this rank does not want to"),
        ("die", Kind.KILLED, "killed by SIGKILL, as the kernel does when memory runs out"),
    ],
)
def test_the_rank_that_failed_first_is_named(how: str, kind: Kind, message: str) -> None:
    with RankGroup(2, env={"OMP_NUM_THREADS": "1"}) as ranks:
        pids = ranks.call(os.getpid)
        started = time.monotonic()
        with pytest.raises(RankFailure) as caught:
            ranks.call(add_but_one, 1, how)
    assert time.monotonic() - started < LIMIT_S
    failure = caught.value.failure
    assert (failure.rank, failure.kind, failure.message) == (1, kind, message)
    assert not any(is_alive(pid) for pid in pids)
    if how == "raise":
        assert failure.traceback
        assert Path(failure.log).read_text().endswith(failure.traceback)


def test_ranks_that_hang_are_killed() -> None:
    with RankGroup(2, env={"OMP_NUM_THREADS": "1"}) as ranks:
        pids = ranks.call(os.getpid)
        with pytest.raises(RankFailure, match=r"^rank \d failed: no answer within 0\.5 s"):
            ranks.call(add_but_one, 1, "hang", timeout_s=0.5)
    assert not any(is_alive(pid) for pid in pids)


def test_what_cannot_start_is_named() -> None:
    with RankGroup(1, backend="carrier_pigeon") as ranks, pytest.raises(RankFailure, match="carrier_pigeon"):
        ranks.call(os.getpid)
