"""Every wrong command of tests/bad_input.py ends with one line and its exit code, and leaves and starts nothing."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.bad_input import ENVIRONMENTS, FILES, WRONG
from tests.in_process import call

ROOT = Path(__file__).parents[2]
FEWEST = 200

pytestmark = pytest.mark.xdist_group("bad input")  # one process imports all entry points


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to call commands in, with files that are wrong in many ways."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "dir.yaml").mkdir()
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "results").mkdir()
    (folder / "results/published").symlink_to(ROOT / "results/published")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder, and every folder in it."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def words_of(command: str) -> list[str]:
    """Return the words of a row, with what LONG, DEEP, DIGITS, HUGE, NUL and BYTE stand for."""
    replaced = command.replace("LONG", "a" * 5000).replace("DEEP", "a/" * 2500).replace("DIGITS", "9" * 5000)
    replaced = replaced.replace("HUGE", str(10**400))
    return [word.replace("NUL", "\0").replace("BYTE", "\udce9") for word in shlex.split(replaced)]


def check(command: str, says: str, folder: Path) -> None:
    """Call a command; its one line must have the words of ``says``, in their order."""
    before = content(folder)
    called = call(words_of(command))
    assert called.code == 2, called
    assert re.fullmatch(r"error: [^\n]+\n", called.err), called.err
    assert re.search(".*".join(map(re.escape, says.split(" ... "))), called.err), called.err
    assert len(called.err) < 3000
    assert content(folder) == before


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_one_line(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    check(command, WRONG[command], folder)


@pytest.mark.parametrize(("variables", "command", "says"), ENVIRONMENTS)
def test_a_wrong_variable_is_one_line(
    variables: dict[str, str | None], command: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    check(command, says, folder)


@pytest.mark.parametrize(
    "command", ["train epochs=0", "sweep demo seed=a", "figures", "track folder", "theory --steps a"]
)
def test_a_folder_that_was_removed_is_one_line(
    command: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    called = call(words_of(command))
    assert (called.code, called.err.count("\n")) == (2, 1), called


def test_the_table_is_long_enough_and_has_every_command() -> None:
    commands = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
    assert {command.split()[0] for command in WRONG} == commands
    assert len(WRONG) >= FEWEST
