"""Why a launch failed, from what its ranks, its watchers and the exit codes say."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.launching import full_disks
from experiments.launching.failure_records import record_failure
from experiments.launching.failures import Kind, RankFailure
from experiments.launching.watching.stall_report import StallReport, read_stall_report, write_stall_report
from experiments.launching.watching.stalls import Stall
from experiments.runs.atomic_files import write_json
from experiments.runs.run_folder import RunFolder

TIME_OUT = "[gloo] Timed out waiting 300000ms for recv operation to complete"
STALL = Stall(1, "did not reach the collective of the others: it was in step 7", "", "loop.py:3 in step")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "errors").mkdir()
    return RunFolder(tmp_path)


def process(exit_code: int, *, pid: int = 1, time: float = 10.0) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exit_code, pid=pid, timestamp=time)


def watch(*, found: StallReport | None = None, missed: Stall | None = None, killed: tuple[int, ...] = ()) -> object:
    return SimpleNamespace(found=lambda: found, missed=lambda: missed, killed=set(killed))


def report(folder: RunFolder, rank: int, message: str, *, collective: bool) -> None:
    row = {"rank": rank, "type": "RuntimeError", "message": message, "collective": collective, "time": 10.0}
    write_json(folder.errors_path / f"rank{rank}.json", {**row, "traceback": "..."})


def test_a_time_out_is_the_fault_of_the_rank_that_did_not_come(folder: RunFolder) -> None:
    """The launcher's own SIGKILL, half a minute later, says nothing of memory."""
    report(folder, 0, TIME_OUT, collective=True)
    ended = {0: process(1), 1: process(-9, time=40.1)}
    cause = record_failure(folder, ended, watch(missed=STALL))  # type: ignore[arg-type]
    assert (cause.rank, cause.kind) == (1, Kind.STALLED)
    assert cause.message.startswith(STALL.message())
    assert TIME_OUT in cause.message
    assert "memory" not in folder.failure_path.read_text()


@pytest.mark.parametrize(
    ("number", "end"), [(9, "SIGKILL, as the kernel does when memory runs out"), (2, "SIGINT"), (1, "SIGHUP")]
)
def test_a_rank_that_died_is_blamed_whomever_the_others_waited_for(folder: RunFolder, number: int, end: str) -> None:
    report(folder, 0, "[gloo] Connection closed by peer", collective=True)
    ended = {0: process(1), 1: process(-number)}
    cause = record_failure(folder, ended, watch(missed=STALL))  # type: ignore[arg-type]
    assert (cause.rank, cause.kind) == (1, Kind.KILLED)
    assert cause.message == f"killed by {end}"


def test_a_rank_that_lost_contact_while_the_disk_is_full_says_so(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank, of another node, had no place for its report."""

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(full_disks, "try_to_write", full)
    report(folder, 0, "Timed out waiting for clients. 1/2 clients joined.", collective=True)
    cause = record_failure(folder, {0: process(1)}, watch())  # type: ignore[arg-type]
    assert cause.of_disk
    assert "no space left on device" in cause.message
    assert cause.message.endswith("RuntimeError: Timed out waiting for clients. 1/2 clients joined.")


@pytest.mark.parametrize(("is_host", "kind"), [(False, Kind.STALLED), (True, Kind.LOST_HOST)])
def test_what_a_watcher_found_holds(folder: RunFolder, is_host: bool, kind: Kind) -> None:
    found = StallReport(1, "lost host node2 (rank 1): it has not answered for 150 s", 10.0, is_host=is_host)
    report(folder, 0, "[gloo] Connection reset by peer", collective=True)
    seen = watch(found=found, killed=(7,))
    error = RankFailure(record_failure(folder, {0: process(1), 2: process(-9, pid=7)}, seen))  # type: ignore[arg-type]
    assert str(error).startswith("lost host node2" if is_host else "rank 1 failed: lost host node2")
    kinds = {row["rank"]: row["kind"] for row in json.loads(folder.failure_path.read_text())["failures"]}
    assert kinds == {0: "lost_peer", 1: kind.name.lower(), 2: "stopped"}


def test_a_node_that_lost_the_store_says_so(folder: RunFolder) -> None:
    cause = record_failure(folder, {}, watch())  # type: ignore[arg-type]
    assert str(RankFailure(cause)).startswith("lost the node at which the others meet, cluster.rdzv_endpoint")


def test_the_first_finding_holds_for_all_hosts(folder: RunFolder) -> None:
    first = write_stall_report(folder.path, StallReport(1, "stood still", 1.0))
    assert write_stall_report(folder.path, StallReport(2, "cut off", 2.0)) == first
    assert read_stall_report(folder.path) == first
    assert [path.name for path in folder.errors_path.iterdir()] == ["stall.json"]
