"""Ranks are started and stopped; the rank that is blamed for a failure is the one that caused it."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from experiments.config.schema import ClusterConfig
from experiments.config.stopping import STOP_SIGNALS, stop_signals
from experiments.launching.elastic import start_ranks
from experiments.launching.failures import Failure, Kind, RankFailure, root_cause
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder
from tests.dist.rank_functions import train
from tests.finished_runs import only_run
from tests.waiting import LIMIT_S, is_alive, wait_until

WORKERS = Path(__file__).parent / "workers"

pytestmark = pytest.mark.dist


def cluster(**settings: Any) -> ClusterConfig:
    return ClusterConfig(**{"name": "local", "nnodes": 1, "nproc_per_node": 2, **settings})


def run(run_dir: Path, job: str, module: str = "idle_worker", **more: Any) -> int:
    (run_dir / "job").write_text(job)
    environ = {"PYTHONPATH": str(WORKERS), "OMP_NUM_THREADS": "3"}
    return start_ranks(RunFolder(run_dir), module, cluster(**more), env=environ)


def failure_of(run_dir: Path, job: str, module: str = "idle_worker", **more: Any) -> Failure:
    """Return the failure in the job's error line, and in its folder."""
    with pytest.raises(RankFailure) as caught:
        run(run_dir, job, module, **more)
    failure = caught.value.failure
    assert Path(failure.log).exists()
    assert str(caught.value) == f"rank {failure.rank} failed: {failure.message} (log: {failure.log})"
    found = json.loads((run_dir / "failure.json").read_text())
    assert (found["rank"], found["message"], found["kind"]) == (
        failure.rank,
        failure.message,
        failure.kind.name.lower(),
    )
    return failure


def test_every_rank_runs_with_its_output_in_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def surroundings() -> object:
        return dict(os.environ), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    before = surroundings()
    assert run(tmp_path, "") == 0
    outputs = [path.read_text() for path in sorted(tmp_path.glob("ranks/*/attempt_0/*/stdout.log"))]
    assert outputs == [f"hello from rank {rank}, 3 threads\n" for rank in range(2)]
    assert capfd.readouterr() == ("", "")
    assert surroundings() == before


@pytest.mark.parametrize(
    ("job", "module", "settings", "rank", "kind", "words"),
    [
        ("raise", "gloo_worker", {"nproc_per_node": 3}, 2, Kind.ERROR, "ValueError: loss is not finite at step 12"),
        ("raise early", "gloo_worker", {}, 1, Kind.ERROR, "ValueError: loss is not finite at step 12"),
        ("exit abort", "gloo_worker", {}, 1, Kind.EXIT, "exit code 3"),
        ("SIGKILL", "gloo_worker", {}, 1, Kind.KILLED, "killed by SIGKILL"),
        ("SIGSTOP", "gloo_worker", {}, 1, Kind.STALLED, "in step 7 (pid "),
        ("watchdog", "idle_worker", {}, 1, Kind.STALLED, "step 7; rank 0 waited: killed by SIGABRT"),  # as NCCL does
        ("restart", "idle_worker", {"max_restarts": 1}, 0, Kind.EXIT, "ValueError: of start 1"),
        ("", "no_such_worker", {"nproc_per_node": 1}, 0, Kind.EXIT, "no_such_worker"),
    ],
)
def test_the_rank_that_began_is_blamed(
    tmp_path: Path, job: str, module: str, settings: dict[str, Any], rank: int, kind: Kind, words: str
) -> None:
    """The others wait for it in a collective, connect to it, or wait for nobody."""
    failure = failure_of(tmp_path, job, module, **settings)
    assert (failure.rank, failure.kind) == (rank, kind)
    assert words in failure.message


def test_a_nan_ends_the_run_with_parameter_rank_and_step(tmp_path: Path) -> None:
    failed = train("dataset=synthetic", "model=mlp", "batch_size=64", "epochs=2", "lr=1e30", f"output={tmp_path}")
    assert failed.returncode == 1
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("error")]
    assert "NonFiniteGradient" in line
    assert "is not finite at step" in line
    folder = only_run(tmp_path)
    assert (folder / "failure.json").exists()
    assert read_records(folder / "steps.jsonl")
    assert not (folder / "DONE").exists()


def test_a_step_that_never_ends_ends_the_run_where_no_rank_waits_in_a_collective(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, "still", "gloo_worker")
    assert "no step ended within 0:00:01" in failure.message
    assert "gloo_worker.py" in Path(failure.log).read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_stops_the_sweep_and_leaves_no_orphan(tmp_path: Path, number: signal.Signals, code: int) -> None:
    path = os.pathsep.join([str(WORKERS), str(WORKERS.parents[2])])
    sweep = subprocess.Popen(
        [sys.executable, str(WORKERS / "sweep.py"), str(tmp_path), "wait"],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    files = [tmp_path / f"0/pid{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "both ranks")
        sweep.send_signal(number)
        assert sweep.wait(LIMIT_S) == code
    finally:
        sweep.kill()
    pids = [int(file.read_text()) for file in files]
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the ranks")
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_has_the_ranks_save_and_end(tmp_path: Path, number: signal.Signals) -> None:
    def strike() -> None:
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, "both ranks")
        os.kill(os.getpid(), number)

    striker = threading.Thread(target=strike)
    striker.start()
    assert run(tmp_path, "save") == number == stop_signals.number
    striker.join()
    assert [int(path.read_text()) for path in tmp_path.glob("saved*")] == [number, number]
    stop_signals.number = 0


def failed(rank: int, kind: Kind, *, time: float = 10.0) -> Failure:
    return Failure(rank=rank, kind=kind, message="", time=time)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([failed(0, Kind.LOST_PEER, time=9.0), failed(1, Kind.ERROR)], 1),
        ([failed(0, Kind.ERROR), failed(1, Kind.KILLED, time=9.9)], 0),  # NCCL ends processes that have lost a peer
        ([failed(0, Kind.EXIT), failed(1, Kind.LOST_PEER, time=9.9)], 0),
        ([failed(0, Kind.STOPPED, time=9.0), failed(1, Kind.LOST_PEER)], 1),
        ([failed(0, Kind.ERROR), failed(1, Kind.ERROR, time=9.0)], 1),
        ([failed(0, Kind.KILLED, time=40.1), failed(1, Kind.LOST_PEER)], 1),  # killed by the agent after its timeout
        ([failed(0, Kind.KILLED, time=15.0), failed(1, Kind.LOST_PEER)], 0),
        ([failed(0, Kind.KILLED), failed(1, Kind.STALLED, time=20.0)], 1),
    ],
)
def test_root_cause(failures: list[Failure], cause: int) -> None:
    assert root_cause(failures).rank == cause
