"""A group of ranks calls one function at once; the rank that failed first is named, in bounded time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.launching.rank_environment import with_python_path
from experiments.tools.ranks.group import GroupError, RankGroup
from tests.dist.rank_functions import add, add_but_one
from tests.waiting import LIMIT_S, is_alive, wait_until

pytestmark = pytest.mark.dist


def test_ranks_answer_in_their_order_and_end_with_the_context() -> None:
    with RankGroup(2) as ranks:
        assert ranks.call(add, 2.0, timeout_s=LIMIT_S) == [4.0] * 2
        assert ranks.call(os.getenv, "RANK") == ["0", "1"]
        pids = ranks.call(os.getpid)
        log = Path(ranks.call(os.readlink, "/proc/self/fd/1")[0])
        assert log.exists()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the ranks")
    assert not log.parent.exists()


@pytest.mark.parametrize(
    ("how", "limit_s", "message"),
    [
        ("raise", LIMIT_S, "ValueError: this rank does not want to"),
        ("die", LIMIT_S, "killed by SIGKILL"),
        ("hang", 0.5, r"no answer within 0\.5 s"),
    ],
)
def test_the_rank_that_failed_first_is_named_and_all_are_ended(how: str, limit_s: float, message: str) -> None:
    with RankGroup(2) as ranks:
        pids = ranks.call(os.getpid)
        started = time.monotonic()
        with pytest.raises(GroupError, match=message) as caught:
            ranks.call(add_but_one, 1, how, timeout_s=limit_s)
    assert time.monotonic() - started < LIMIT_S
    assert how == "hang" or caught.value.rank == 1
    assert not any(is_alive(pid) for pid in pids)
    assert caught.value.traceback in caught.value.log.read_text()


PARENTS = {
    "ranks": """
import os, time
from experiments.tools.ranks.group import RankGroup
with RankGroup(1) as ranks:
    print(ranks.call(os.getpid)[0], flush=True)
    time.sleep(600)
""",
    "compare": """
import os, time
from experiments.tools.compare.tasks import processes
if __name__ == "__main__":
    with processes(2) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
""",
}


@pytest.mark.parametrize("parent", PARENTS)
def test_processes_end_with_a_parent_that_is_killed(parent: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PARENTS[parent])
    command = [sys.executable, str(program)]
    owner = subprocess.Popen(command, env=with_python_path(os.environ), stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    pid = int(owner.stdout.readline())
    assert is_alive(pid)
    owner.kill()
    owner.communicate(timeout=LIMIT_S)
    wait_until(lambda: not is_alive(pid), "the end of the process")
