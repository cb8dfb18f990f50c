"""Worker processes call what they are sent, report in one line why they failed, and never outlive their parent."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from experiments.launching.child_environment import child_environment
from experiments.launching.worker_process import WorkerFailure, WorkerProcess
from tests.waiting import LIMIT_S, is_alive, wait_until

pytestmark = pytest.mark.dist


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(tmp_path / "log", env={"GREETING": "hello"})
    yield worker
    worker.kill()
    assert worker.process.returncode is not None


def test_calls_are_answered_in_their_order(worker: WorkerProcess) -> None:
    worker.send(os.getpid)
    worker.send(partial(int, base=2), "101")
    worker.send(print, "this is no answer")
    worker.send(os.getenv, "GREETING")
    worker.send(gc.get_threshold)
    assert [worker.receive() for _ in range(4)] == [worker.process.pid, 5, None, "hello"]
    assert worker.receive()[2] > gc.get_threshold()[2]  # seldom a full collection
    assert worker.log.read_text() == "this is no answer\n"


def test_an_exception_is_one_line_and_its_traceback_is_in_the_log(worker: WorkerProcess) -> None:
    worker.send(int, "a\nb")
    with pytest.raises(WorkerFailure, match=r"^ValueError: invalid literal for int\(\) .*$") as caught:
        worker.receive()
    assert caught.value.report
    assert not caught.value.report.lost_peer
    assert "\n" not in str(caught.value)
    assert worker.log.read_text().endswith(caught.value.report.traceback)
    assert worker.process.wait(LIMIT_S) == 1


def test_what_cannot_be_sent_back_is_an_error_too(worker: WorkerProcess) -> None:
    worker.send(threading.Lock)
    with pytest.raises(WorkerFailure, match=r"^TypeError: cannot pickle '_thread.lock' object$"):
        worker.receive()


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [(3, r"^exit code 3, last line of its log: goodbye$"), (-signal.SIGSEGV, r"^killed by SIGSEGV$")],
)
def test_a_process_that_ends_says_how(worker: WorkerProcess, exit_code: int, text: str) -> None:
    worker.send(print, "goodbye")
    worker.receive()
    worker.send(*((sys.exit, exit_code) if exit_code > 0 else (signal.raise_signal, -exit_code)))
    for _ in range(2):  # also when it is asked again
        with pytest.raises(WorkerFailure, match=text) as caught:
            worker.receive()
        worker.send(os.getpid)
    assert caught.value.exit_code == exit_code


def test_ctrl_c_reaches_the_parent_alone(worker: WorkerProcess) -> None:
    worker.send(os.getsid, 0)
    assert worker.receive() == worker.process.pid != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize("busy", [True, False])
def test_it_ends_with_its_parent(tmp_path: Path, busy: bool) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom experiments.launching.worker_process import WorkerProcess\n"
        f"worker = WorkerProcess(Path({str(tmp_path / 'log')!r}))\n"
        f"worker.send(print, 'up')\nworker.receive()\nworker.send(time.sleep, {1000 if busy else 0})\n"
        "print(worker.process.pid, flush=True)\ntime.sleep(1000)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    wait_until(lambda: not is_alive(pid), "the end of the process")


def test_a_process_that_is_closed_finishes_its_call(tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path / "log")
    worker.send(time.sleep, 0.2)
    worker.send(Path.touch, tmp_path / "second")
    worker.close()
    assert worker.process.returncode == 0
    assert not (tmp_path / "second").exists()
