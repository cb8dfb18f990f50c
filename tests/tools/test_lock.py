"""A run folder has one owner: the lock, what others see of it, and what an owner finds that lost the folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import ROOT
from experiments.config.errors import UserError
from experiments.runs.run_folder import FolderInUse, FolderLost, RunFolder
from experiments.runs.status import State, state_of, write_done
from tests.refusals import refused

OWNER = """
import sys
from pathlib import Path
from experiments.runs.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).claim():
    print("mine", flush=True)
    sys.stdin.read()
"""


def claimed(run: RunFolder) -> None:
    with run.claim():
        pytest.fail("two owners")


def test_only_one_process_owns_a_folder_and_its_death_frees_it(tmp_path: Path) -> None:
    run, pipe = RunFolder(tmp_path / "a" / "b"), subprocess.PIPE
    command = [sys.executable, "-c", OWNER, str(run.path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        refused(lambda: claimed(run), str(run.path), f"pid {owner.pid} on ", error=FolderInUse)
        assert state_of(run) == State.RUNNING
        owner.kill()
    assert not run.is_locked()
    with run.claim():
        assert run.is_locked()
        refused(lambda: claimed(run), str(run.path), error=FolderInUse)  # of the same process, too
        run.check_owned()
    assert run.owner() is None
    run.check_owned()  # nobody claims it


def test_an_owner_finds_that_its_folder_was_removed_or_replaced(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    for is_made_again in (False, True):
        with run.claim():
            run.check_owned()
            run.path.rename(tmp_path / f"away{is_made_again}")
            if is_made_again:  # by another job, the new owner
                run.make()
                (run.path / ".lock").touch()
                (run.path / ".owner.json").write_text("{}")
            refused(lambda: write_done(run, {}, {}), "was removed", run.path, error=FolderLost)
        assert not run.is_done()
    assert (run.path / ".owner.json").exists(), "it is that of the other owner"


def test_a_lock_file_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    refused(lambda: claimed(RunFolder(tmp_path)), "cannot write", tmp_path, error=UserError)
