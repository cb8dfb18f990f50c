"""A run folder has one owner: the lock, what others see of it, and what an owner finds that lost the folder."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config.errors import UserError
from experiments.runs.lock import FolderInUse, FolderLost
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import State, state_of

REPOSITORY = Path(__file__).parents[2]
OWNER = """
import sys
from pathlib import Path
from experiments.runs.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).claim():
    print("mine", flush=True)
    sys.stdin.read()
"""


def test_only_one_process_owns_a_folder_and_its_death_frees_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a" / "b")
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", OWNER, str(run.path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        with pytest.raises(FolderInUse) as caught, run.claim():
            pytest.fail("two owners")
        assert f"pid {owner.pid} on " in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert state_of(run) == State.RUNNING
        owner.kill()
    assert not run.is_locked()
    with run.claim():
        assert run.is_locked()
    assert run.owner() is None


def test_two_claims_of_one_process_collide_too(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.claim(), pytest.raises(FolderInUse), run.claim():
        pytest.fail("two owners")
    with run.claim():
        run.check_owned()
    run.check_owned()  # nobody claims it


def no_locks(number: int) -> object:
    def flock(descriptor: int, operation: int) -> None:
        if number:
            raise OSError(number, "no locks")

    return flock


@pytest.mark.parametrize("number", [0, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_a_common_lock_the_owner_before_finds_that_it_lost_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Where locks are local to a machine, or there are none, the second of two jobs takes the folder over."""
    monkeypatch.setattr(fcntl, "flock", no_locks(number))
    run = RunFolder(tmp_path)
    with run.claim():
        run.check_owned()
        token = run.path / ".owner.json"
        token.write_text(token.read_text().replace('"token": "', '"token": "other'))
        with pytest.raises(FolderLost, match="was taken over by pid"):
            run.mark_done({})
    assert token.exists(), "it is that of the other owner"
    assert not run.is_done()


def test_an_owner_whose_folder_was_removed_writes_nothing_there(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.claim():
        (tmp_path / ".owner.json").unlink()
        with pytest.raises(FolderLost, match="was removed"):
            run.check_owned()


def test_a_lock_file_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="cannot use run folder") as caught, RunFolder(tmp_path).claim():
        pytest.fail("claimed")
    assert len(str(caught.value).splitlines()) == 1
