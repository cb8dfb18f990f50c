"""The lease of a run folder, which keeps owners on different machines apart: taken, renewed, lost, left by a kill."""

import errno
import fcntl
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.config.errors import UserError
from experiments.runs import folder_lock, lease
from experiments.runs import owner as owners
from experiments.runs.folder_lock import FolderInUse
from experiments.runs.lease import LIMIT_S, LOOK_S, Lease, LeaseHeld, LeaseLost, check_lease, take
from experiments.runs.owner import Owner, this_process
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import State, state_of
from experiments.sweeps.summaries import describe
from tests.crashes import Crash, crash_at
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
LOOKS = round(LIMIT_S / LOOK_S)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """A clock of its own: each look calls the next of these functions; the list of what is left must be empty."""
    events: list[Callable[[], object]] = []
    monkeypatch.setattr(lease, "sleep", lambda seconds: events.pop(0)() if events else pytest.fail("one look too many"))
    yield events
    assert not events, "fewer looks than expected"


def nothing() -> None:
    """A look at which nothing happened."""


def elsewhere(**fields: Any) -> Owner:
    """An owner on another machine."""
    other = {"machine": "another", "host": "node7", "pid": 7, "job": "SLURM job 71", "has_flock": True}
    return replace(this_process(has_flock=True, launch=None), **{**other, **fields})


def leased(folder: RunFolder, owner: Owner | str, number: int = 1, released: bool = False) -> Path:
    """Write the lease of an owner that is not this process."""
    path = folder.path / ".lease" / (f"{number}.released" if released else str(number))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(owner if isinstance(owner, str) else owner.to_json())
    os.utime(path, (1000, 1000))
    return path


NOT_WHOLE = ["[" * 10**5, *(elsewhere().to_json().replace('"pid": 7', pid) for pid in ('"pid": 1e999', '"pid": null'))]


def beat(path: Path) -> Callable[[], None]:
    return lambda: os.utime(path, (2000, 2000))


def within(context: AbstractContextManager[object], work: Callable[[], object]) -> None:
    with context:
        work()


def names(folder: RunFolder) -> list[str]:
    return sorted(os.listdir(folder.path / ".lease"))


def test_an_owner_on_another_machine_that_renews_its_lease_keeps_the_folder(
    tmp_path: Path, looks: list[Callable[[], object]]
) -> None:
    run = RunFolder(tmp_path)
    path = leased(run, elsewhere())
    looks += [nothing, beat(path)]
    with pytest.raises(FolderInUse, match=r"in use by pid 7 on node7 \(SLURM job 71\) since 2\S+; wait") as caught:
        run.claim().__enter__()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert names(run) == ["1"]


@pytest.mark.parametrize("content", [elsewhere(), "", '{"pid": 3', "[1, 2]", *NOT_WHOLE])
def test_a_lease_that_nobody_renews_is_taken_after_the_limit_and_not_before(
    tmp_path: Path, looks: list[Callable[[], object]], content: Owner | str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path)
    leased(run, content)
    run.steps_path.write_text('{"step": 0}\n')
    (run.checkpoints_path / "step-000000001").mkdir(parents=True)
    (run.checkpoints_path / "step-000000001" / "CHECKPOINT.json").touch()
    looks += [nothing] * LOOKS
    with run.steps_path.open("a") as stray, run.claim():
        assert names(run) == ["2"]
        stray.write('{"step": 1}\n')  # by a process of the earlier owner that goes on
        stray.flush()
        assert run.steps_path.read_text() == '{"step": 0}\n'
    assert names(run) == ["2.released"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "gives no sign of life" in said


def test_what_happens_while_one_looks(tmp_path: Path, looks: list[Callable[[], object]]) -> None:
    given_back = RunFolder(tmp_path / "given back")
    path = leased(given_back, elsewhere())
    looks += [nothing, lambda: path.rename(path.with_name("1.released"))]
    with given_back.claim():
        assert names(given_back) == ["2"]
    lost = RunFolder(tmp_path / "lost to a third")
    leased(lost, elsewhere(), 4)
    looks += [nothing, lambda: leased(lost, elsewhere(pid=8), 5)]
    with pytest.raises(FolderInUse, match="pid 8"), lost.claim():
        pytest.fail("two owners")
    torn = RunFolder(tmp_path / "being written")
    path = leased(torn, "")
    looks += [nothing, lambda: leased(torn, elsewhere(pid=9))]
    with pytest.raises(FolderInUse, match="pid 9"), torn.claim():
        pytest.fail("two owners")


def no_flock(number: int, operation: int) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def zombie() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["true"])
    wait_until(lambda: owners.process_started(process.pid) is None, "the end of a process that is not collected")
    return process


def test_on_one_machine_an_owner_that_died_is_followed_at_once(
    tmp_path: Path, looks: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = this_process(has_flock=True, launch=None)
    run = RunFolder(tmp_path)
    leased(run, replace(here, pid_namespace=5, host="container"))
    with run.claim():  # the lock of the operating system is free
        assert names(run) == ["2"]
    monkeypatch.setattr(fcntl, "flock", no_flock)
    ended = zombie()
    for number, dead in enumerate([{"started": 1}, {"pid": ended.pid}, {"pid": 2**22 + 1}], start=3):
        leased(run, replace(here, **dead), 2 * number)  # type: ignore[arg-type]
        with run.claim():
            assert names(run) == [str(2 * number + 1)]
    ended.wait()
    for number, unknown in enumerate([{"pid_namespace": 5}, {"machine": "boot before"}, {"started": None}], start=20):
        leased(run, replace(here, **unknown), 2 * number)  # type: ignore[arg-type]
        looks += [nothing] * LOOKS
        with run.claim():
            assert names(run) == [str(2 * number + 1)]


def test_two_processes_of_a_machine_whose_disk_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", no_flock)
    run = RunFolder(tmp_path)
    with run.claim():
        assert run.is_locked()
        with pytest.raises(FolderInUse, match=f"pid {os.getpid()} on"), run.claim():
            pytest.fail("two owners")
    assert not run.is_locked()


def test_of_many_that_want_a_free_lease_one_gets_it(tmp_path: Path) -> None:
    for round_ in range(10):
        start, results = threading.Barrier(8), list[Lease | LeaseHeld]()

        def contend(number: int, start: threading.Barrier = start, results: list[Any] = results) -> None:
            owner = elsewhere(token=str(number), machine=str(number))
            start.wait()
            try:
                results.append(take(tmp_path, owner))
            except LeaseHeld as held:
                results.append(held)

        # Losers see no second beat of an owner that is a thread: they see its file appear or look for the limit.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lease, "LIMIT_S", 1e9)
            patch.setattr(lease, "sleep", lambda seconds: beat_all(tmp_path))
            threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        (winner,) = [result for result in results if isinstance(result, Lease)]
        assert {result.entry.number for result in results if isinstance(result, LeaseHeld)} == {round_ + 1}
        assert winner.beat()
        winner._release()


def beat_all(path: Path) -> None:
    for file in (path / ".lease").iterdir():
        with suppress(FileNotFoundError):
            os.utime(file)


def test_an_owner_that_was_superseded_writes_no_more(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.claim():
        run.steps_path.write_text('{"step": 0}\n{"step": 1}\n')
        run.check_owned()
        superseded(run)
        for write in (run.check_owned, lambda: run.mark_done({}), lambda: run.rewind()):
            with pytest.raises(LeaseLost, match="was taken over by pid 7 on node7") as caught:
                write()
    assert not run.is_done()
    assert run.steps_path.read_text().count("\n") == 2
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    check_lease(tmp_path)  # this process claims nothing any more


def superseded(run: RunFolder) -> None:
    leased(run, elsewhere(), 2)


def removed(run: RunFolder) -> None:
    for file in (run.path / ".lease").iterdir():
        file.unlink()


@pytest.mark.parametrize(("event", "message"), [(superseded, "was taken over by pid 7"), (removed, "was removed")])
@pytest.mark.parametrize("raised", [None, SystemExit(143), UserError("a peer is gone")])
def test_the_main_thread_stops_when_the_lease_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    event: Callable[[RunFolder], None],
    message: str,
    raised: BaseException | None,
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    run = RunFolder(tmp_path)
    before = signal.getsignal(signal.SIGURG)

    def work() -> None:
        event(run)
        try:
            time.sleep(60)  # a signal ends it
        except LeaseLost:
            if raised:
                raise raised from None
            raise

    with pytest.raises(LeaseLost, match=message):
        within(run.claim(), work)
    assert signal.getsignal(signal.SIGURG) == before


def test_a_process_that_cannot_stop_ends_hard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    monkeypatch.setattr(lease, "STOP_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    run = RunFolder(tmp_path)

    def hang() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])  # as in a call that never returns
        try:
            superseded(run)
            assert ended.wait(60)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])

    with pytest.raises(LeaseLost):
        within(run.claim(), hang)
    said = capsys.readouterr().err
    assert said.startswith("error: run folder ")
    assert said.count("\n") == 1


MOMENTS = [(os, "open"), (os, "write"), (os, "utime"), (Path, "mkdir"), (Path, "unlink"), (Path, "rename")]


def test_a_kill_at_any_moment_leaves_a_lease_that_the_next_start_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = 0

    def count(seconds: float) -> None:
        nonlocal num_looks
        num_looks += 1

    monkeypatch.setattr(lease, "sleep", count)
    num_waits = 0
    for moment in itertools.count():
        run = RunFolder(tmp_path / str(moment))
        leased(run, elsewhere(), 3, released=True)
        finished = False
        with suppress(Crash), crash_at(moment, MOMENTS, monkeypatch, for_good=True), ExitStack() as owned:
            held = owned.enter_context(run.locked())
            assert held.beat()
            owned.close()
            finished = True
        num_looks = 0
        with run.claim():
            assert run.is_locked()
        assert num_looks in (0, LOOKS), moment
        num_waits += num_looks > 0
        assert [name for name in names(run) if not name.endswith(".released")] == []
        if finished:
            break
    assert moment > 8
    assert num_waits == 1  # the file was there and its owner not yet in it


def test_who_looks_at_a_folder_that_cannot_be_written_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    path = leased(run, elsewhere())
    (tmp_path / ".lock").touch()
    run.config_path.touch()
    real = os.open

    def read_only(name: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(name).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(name, flags, *rest, **options)

    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    os.utime(path)
    monkeypatch.setattr(os, "open", read_only)
    for owner, name in ((os, "utime"), (os, "write"), (Path, "mkdir"), (Path, "rename"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, refused)
    assert (run.is_locked(), state_of(run)) == (True, State.RUNNING)
    assert describe(run).startswith("pid 7 on node7 (SLURM job 71) since ")
    with pytest.raises(UserError, match=r"cannot use run folder .*read-only file system; make"), run.claim():
        pytest.fail("claimed")
    monkeypatch.undo()
    for age, running in ((50, True), (70, False), (-70, False)):  # another machine's clock may differ a little
        os.utime(path, (time.time() - age,) * 2)
        assert run.is_locked() is running
    (tmp_path / ".lock").unlink()
    assert not run.is_locked()
    os.utime(path)
    monkeypatch.setattr(os, "listdir", refused)  # of a user who may not read it
    assert not run.is_locked()


def test_another_node_of_the_same_launch_follows_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[Callable[[], object]]
) -> None:
    run = RunFolder(tmp_path)
    with run.claim(launch="host:1") as _:
        with pytest.raises(FolderInUse) as caught, run.claim(launch="host:1"):
            pytest.fail("two owners")
        with run.follow(caught.value):
            run.check_owned()
        assert names(run) == ["1"]
        monkeypatch.setattr(lease, "BEAT_S", 0.01)
        with pytest.raises(LeaseLost):
            within(run.follow(caught.value), lambda: (superseded(run), time.sleep(60)))
    other = RunFolder(tmp_path / "other")  # its owner still looks whether the one before is alive
    path = leased(other, elsewhere(launch="host:1"))
    monkeypatch.setattr(folder_lock, "_lock_by_system", lambda path, owned: None)
    looks += [nothing, nothing, lambda: path.rename(path.with_name("1.released")), nothing]
    looks += [lambda: leased(other, elsewhere(launch="host:1", pid=8), 2)]
    with pytest.raises(FolderInUse, match="pid 8"), other.claim(launch="host:1"):
        pytest.fail("two owners")


ON_ANOTHER_MACHINE = """
import fcntl, sys, time
from pathlib import Path
from experiments.config.errors import UserError
from experiments.runs import lease, owner
from experiments.runs.run_folder import RunFolder

lease.BEAT_S = 0.05
fcntl.flock = lambda descriptor, operation: None  # as on a disk where each machine has locks of its own
owner.machine = lambda: "node2"
run = RunFolder(Path(sys.argv[1]))
try:
    with run.claim():
        print("mine", flush=True)
        while True:
            time.sleep(60)
except UserError as error:
    sys.exit(f"error: {error}")
"""


def test_a_suspended_owner_is_followed_and_stops_with_one_line_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    command = [sys.executable, "-c", ON_ANOTHER_MACHINE, str(run.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as other:
        try:
            assert other.stdout is not None
            assert other.stderr is not None
            assert other.stdout.readline() == "mine\n"
            assert run.is_locked()
            with pytest.raises(FolderInUse, match=f"pid {other.pid} on"), run.claim():
                pytest.fail("two owners")
            other.send_signal(signal.SIGSTOP)
            wait_until(lambda: state_in_proc(other.pid) == "T", "the other process to stand still")
            monkeypatch.setattr(lease, "sleep", lambda seconds: None)  # it does not renew its lease, however long
            with run.claim():
                run.mark_done({"by": "the second"})
            done = run.done_path.read_text()
            other.send_signal(signal.SIGCONT)
            assert other.wait(timeout=300) == 1
            assert "Traceback" not in (said := other.stderr.read())
        finally:
            other.kill()
    assert said.splitlines()[-1].startswith(f"error: run folder {run.path} was taken over by pid {os.getpid()} on ")
    assert said.count("\n") == 1
    assert run.done_path.read_text() == done
    assert names(run) == ["2.released"]


def state_in_proc(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
