"""A group of ranks calls one function at once; the rank that failed first is named, in bounded time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.ranks.group import RankFailure, RankGroup
from tests.dist.rank_functions import add, add_but_one
from tests.waiting import LIMIT_S, is_alive, wait_until

pytestmark = pytest.mark.dist
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def test_ranks_answer_in_their_order_and_end_with_the_context() -> None:
    with RankGroup(2, env=ONE_THREAD) as ranks:
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
    ("how", "message"), [("raise", "ValueError: this rank does not want to"), ("die", "killed by SIGKILL")]
)
def test_the_rank_that_failed_first_is_named(how: str, message: str) -> None:
    with RankGroup(2, env=ONE_THREAD) as ranks:
        pids = ranks.call(os.getpid)
        started = time.monotonic()
        with pytest.raises(RankFailure, match=message) as caught:
            ranks.call(add_but_one, 1, how)
    assert time.monotonic() - started < LIMIT_S
    assert caught.value.rank == 1
    assert not any(is_alive(pid) for pid in pids)
    if how == "raise":
        assert caught.value.traceback
        assert caught.value.traceback in caught.value.log.read_text()


def test_ranks_that_hang_are_killed() -> None:
    with RankGroup(2, env=ONE_THREAD) as ranks:
        pids = ranks.call(os.getpid)
        with pytest.raises(RankFailure, match=r"no answer within 0\.5 s"):
            ranks.call(add_but_one, 1, "hang", timeout_s=0.5)
    assert not any(is_alive(pid) for pid in pids)


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import os, time\nfrom experiments.ranks.group import RankGroup\n"
        "with RankGroup(1) as ranks:\n"
        "    print(ranks.call(os.getpid)[0], flush=True)\n"
        "    time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.communicate(timeout=LIMIT_S)
    wait_until(lambda: not is_alive(pid), "the end of the rank")
