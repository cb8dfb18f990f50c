"""Ranks are started, watched and stopped; the rank that is blamed for a failure is the one that caused it."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from experiments.config.errors import UserError
from experiments.config.stopping import STOP_SIGNALS
from experiments.launching.failures import Failure, Kind, RankFailure, root_cause
from experiments.launching.launch import launch
from experiments.launching.rank_process import LAUNCHER_PID
from experiments.runs.stop_signals import stop_signals
from tests.waiting import LIMIT_S, is_alive, wait_until

WORKERS = Path(__file__).parent / "workers"
ENVIRONMENT = {"PYTHONPATH": str(WORKERS)}

pytestmark = pytest.mark.dist


def run(
    run_dir: Path,
    job: str,
    *,
    module: str = "idle_worker",
    nproc: int = 2,
    timeout_s: float = 300.0,
    max_restarts: int = 0,
    **more: str,
) -> None:
    (run_dir / "job").write_text(job)
    launch(
        run_dir,
        module=module,
        nproc_per_node=nproc,
        run_id="test",
        max_restarts=max_restarts,
        timeout_s=timeout_s,
        env={**ENVIRONMENT, **more},
    )


def start_sweep(folder: Path, job: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(WORKERS), str(WORKERS.parents[2])])
    return subprocess.Popen(
        [sys.executable, str(WORKERS / "sweep.py"), str(folder), job],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_every_rank_runs_with_its_output_in_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tmp_path, "", OMP_NUM_THREADS="3")
    for rank in range(2):
        assert (tmp_path / f"ranks/rank{rank}/stdout.log").read_text() == f"hello from rank {rank}, 3 threads\n"
        assert int((tmp_path / f"gc{rank}").read_text()) > gc.get_threshold()[2]  # seldom a full collection
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert LAUNCHER_PID not in os.environ


def test_cores_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run(tmp_path, "", nproc=1)
    cores = len(os.sched_getaffinity(0))
    assert f" {cores} threads" in (tmp_path / "ranks/rank0/stdout.log").read_text()
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("job", "module", "nproc", "kind", "message"),
    [
        ("raise", "gloo_worker", 3, Kind.ERROR, "ValueError: loss is not finite at step 12"),
        ("raise abort", "gloo_worker", 2, Kind.ERROR, "ValueError: loss is not finite at step 12"),
        ("exit abort", "gloo_worker", 2, Kind.EXIT, "exit code 3"),
        ("SIGABRT", "gloo_worker", 2, Kind.KILLED, "killed by SIGABRT"),
        ("SIGKILL", "gloo_worker", 2, Kind.KILLED, "killed by SIGKILL, as the kernel does when memory runs out"),
        ("SIGSEGV", "idle_worker", 2, Kind.KILLED, "killed by SIGSEGV"),
        ("exit", "idle_worker", 2, Kind.EXIT, "exit code 3"),
    ],
)
def test_the_rank_that_began_is_blamed(
    tmp_path: Path, job: str, module: str, nproc: int, kind: Kind, message: str
) -> None:
    """The others wait for it in a collective (gloo_worker), or for nobody."""
    last = nproc - 1
    with pytest.raises(RankFailure) as caught:
        run(tmp_path, job, module=module, nproc=nproc, OMP_NUM_THREADS="1")
    assert str(caught.value) == f"rank {last} failed: {message} (log: {tmp_path / f'ranks/rank{last}/stderr.log'})"
    assert caught.value.failure.kind == kind
    found = json.loads((tmp_path / "failure.json").read_text())
    assert (found["rank"], found["message"], found["kind"]) == (last, message, kind.name.lower())
    assert last in {failure["rank"] for failure in found["failures"]}


@pytest.mark.parametrize(
    ("job", "timeout_s", "words"),
    [
        ("stand", 20.0, r"stood still for \d+ s \(stopped by a signal\), last seen in (the start|step 7)"),
        ("miss", 12.0, "did not reach the collective of the others: it was in step 7"),
    ],
)
def test_a_rank_that_others_wait_for_is_named_with_its_place_and_the_collective(
    tmp_path: Path, job: str, timeout_s: float, words: str
) -> None:
    """The others neither fail nor time out: their launcher ends them, and blames no lack of memory."""
    with pytest.raises(RankFailure) as caught:
        run(tmp_path, job, timeout_s=timeout_s)
    place = "idle_worker.py:\\d+ in (<module>|miss_the_collective)"
    expected = rf"^rank 1 failed: {words}, at {place}; rank 0 waited in all_reduce for \d+ s \(log: "
    assert re.search(expected, str(caught.value)), caught.value
    assert caught.value.failure.kind == Kind.STALLED
    found = {failure["rank"]: failure for failure in json.loads((tmp_path / "failure.json").read_text())["failures"]}
    assert (found[0]["kind"], found[0]["message"]) == (
        "stopped",
        "ended by the launcher, after another rank had failed",
    )
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    assert not any(is_alive(pid) for pid in pids)


def test_the_rank_that_others_waited_for_is_named_where_nccl_aborts_them(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"^rank 1 failed: did not reach .*: killed by SIGABRT: .* caught"):
        run(tmp_path, "watchdog", timeout_s=20.0)


def test_the_error_of_the_last_start_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"^rank 0 failed: ValueError: of start 1 "):
        run(tmp_path, "restart", max_restarts=1)


def test_ranks_that_compute_longer_than_the_limit_are_left_alone(tmp_path: Path) -> None:
    run(tmp_path, "compute", timeout_s=5.0)
    assert not (tmp_path / "failure.json").exists()


def test_an_error_is_reported_without_help_of_the_worker(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"^rank 1 failed: ValueError: loss is not finite at step 12 \("):
        run(tmp_path, "raise")
    report = json.loads((tmp_path / "errors/rank1.json").read_text())
    assert report["message"] == "loss is not finite\nat step 12"
    assert "idle_worker.py" in report["traceback"]
    assert not report["collective"]
    with pytest.raises(
        RankFailure, match="last line of its log: nothing to do here"
    ):  # and not the error of the last time
        run(tmp_path, "leave", nproc=1)


def test_a_waiting_thread_does_not_hide_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="must not keep this from being seen"):
        run(tmp_path, "raise beside a thread", nproc=1)


def test_a_module_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="no_such_worker"):
        run(tmp_path, "", module="no_such_worker", nproc=1)


def test_a_sweep_tells_one_line_per_failed_run_and_goes_on(tmp_path: Path) -> None:
    output, errors = start_sweep(tmp_path, "raise").communicate(timeout=LIMIT_S)
    assert output == ""
    assert [line.split(" (log")[0] for line in errors.splitlines()] == [
        "rank 1 failed: ValueError: loss is not finite at step 12"
    ] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_stops_the_sweep_and_leaves_no_orphan(tmp_path: Path, number: signal.Signals, code: int) -> None:
    sweep = start_sweep(tmp_path, "wait")
    files = [tmp_path / f"0/pid{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "both ranks")
        sweep.send_signal(number)
        sweep.communicate(timeout=LIMIT_S)
    finally:
        sweep.kill()
    assert sweep.returncode == code
    pids = [int(file.read_text()) for file in files]
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the ranks")
    assert not (tmp_path / "1").exists()


def test_ranks_ignore_what_their_launcher_does_and_what_is_meant_for_it(tmp_path: Path) -> None:
    """A script ignores SIGINT for its background jobs, nohup SIGHUP; SLURM sends SIGUSR2, submitit's, to all."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        run(tmp_path, "ignore", nproc=1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_has_the_ranks_save_and_end(tmp_path: Path, number: signal.Signals) -> None:
    def strike() -> None:
        wait_until(lambda: len(list(tmp_path.glob("ranks/*/saves"))) == 2, "both ranks")
        os.kill(os.getpid(), number)

    striker = threading.Thread(target=strike)
    striker.start()
    run(tmp_path, "save")
    striker.join()
    assert stop_signals.number == number
    assert len(list(tmp_path.glob("saved*"))) == 2
    stop_signals.number = 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node must be at least 1, got 0"),
        (
            {"nproc_per_node": 1, "rdzv_endpoint": "head"},
            "rdzv_endpoint must be HOST:PORT, one of the nodes and a free port of it, got 'head'",
        ),
        ({"nproc_per_node": 1, "nnodes": 2}, "rdzv_endpoint must name a port when nnodes is 2, got 'localhost:0'"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        launch(tmp_path, module="idle_worker", run_id="test", **arguments)
    assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


def failed(rank: int, kind: Kind, *, time: float = 10.0) -> Failure:
    return Failure(rank=rank, kind=kind, message="", time=time, exit_code=1, log="")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([failed(0, Kind.LOST_PEER, time=9.0), failed(1, Kind.ERROR)], 1),
        ([failed(0, Kind.ERROR, time=9.9), failed(1, Kind.KILLED)], 0),
        ([failed(0, Kind.ERROR, time=10.9), failed(1, Kind.KILLED)], 0),  # both in one second: NCCL ends processes
        ([failed(0, Kind.ERROR, time=12.0), failed(1, Kind.KILLED)], 1),
        ([failed(0, Kind.ERROR, time=9.9), failed(1, Kind.STALLED)], 0),
        ([failed(0, Kind.EXIT), failed(1, Kind.KILLED)], 1),
        ([failed(0, Kind.EXIT), failed(1, Kind.LOST_PEER, time=9.9)], 0),
        ([failed(0, Kind.STOPPED, time=9.0), failed(1, Kind.LOST_PEER)], 1),
        ([failed(0, Kind.ERROR), failed(1, Kind.ERROR, time=9.0)], 1),
        ([failed(0, Kind.KILLED, time=40.0), failed(1, Kind.ERROR)], 1),  # SIGKILL after the grace of a shutdown
        ([failed(0, Kind.KILLED, time=40.1), failed(1, Kind.LOST_PEER)], 1),  # the same: 30 s
        ([failed(0, Kind.KILLED, time=15.0), failed(1, Kind.LOST_PEER)], 0),
        ([failed(0, Kind.KILLED), failed(1, Kind.STALLED, time=20.0)], 1),
    ],
)
def test_root_cause(failures: list[Failure], cause: int) -> None:
    assert root_cause(failures).rank == cause
