"""Commands find out before their work that ``--out`` cannot be written, and say it in one line after it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import bench, compare, figures, profile, reproduce, simulate, theory
from experiments.config.command_line import run_command
from experiments.config.errors import UserError
from experiments.runs import files
from tests.dist.rank_functions import called
from tests.small_disks import MemoryDisk, mounted

COMMANDS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "simulate": (simulate.main, []),
    "theory": (theory.main, []),
    "compare": (compare.main, []),
    "figures": (figures.main, []),
    "reproduce": (reproduce.main, ["micro"]),
    **{f"bench {name}": (bench.main, [name]) for name in ("step", "network")},
}
PROFILES = {f"profile {name}": (profile.main, [name]) for name in ("link", "select", "backward")}


def refused(name: str, out: Path) -> str:
    """Return the line of a command that cannot write into ``out``."""
    main, words = (COMMANDS | PROFILES)[name]
    ended = called(main, *words, "--out", str(out))
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    (line,) = ended.stderr.splitlines()
    return line


@pytest.mark.parametrize("name", COMMANDS)
def test_out_is_tried_before_the_work(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for out, why in ((file, f"{file} is no folder"), (file / "y", f"{file} is no"), (Path("/proc/x"), "no such file")):
        line = refused(name, out)
        assert line.startswith(f"error: cannot write into {out}: {why}")
        assert line.endswith("; choose another --out")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_written_to_a_file_of_its_own(name: str, tmp_path: Path) -> None:
    """Anybody's file stays what it is, a device too: a command of root would replace either."""
    foreign = tmp_path / "passwd"
    foreign.write_text("root:x:0:0\n")
    there = "exists, and this command did not write it: remove it or choose another --out"
    for path in (foreign, Path("/dev/null")):
        assert refused(name, path) == f"error: {path} {there}"
    assert refused(name, tmp_path) == f"error: --out must be a file, got the folder {tmp_path}"
    assert f"cannot write into {foreign}: {foreign} is no folder; " in refused(name, foreign / "x.json")
    assert foreign.read_text() == "root:x:0:0\n"
    (tmp_path / "empty").touch()
    (tmp_path / "ours").write_text('{"format": "micro-link-1"}')
    for ours in ("empty", "ours", "new"):
        profile.check_file(tmp_path / ours)


def test_a_full_disk_is_reported_before_the_work(tmp_path: Path) -> None:
    with mounted(MemoryDisk(tmp_path / "disk", "8k")) as disk:
        disk.fill()
        assert f"cannot write into {disk.path}/out: no space left on device (" in refused("simulate", disk.path / "out")


def test_an_error_names_what_is_in_the_way_and_nothing_is_left_of_the_attempt(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    assert files.write_atomic(out / "a.csv", "a").read_text() == "a"  # in a new folder
    (out / "b.csv").mkdir()
    with pytest.raises(UserError, match=r"/new/out/b.csv: is a directory"):
        files.write_atomic(out / "b.csv", "b")
    assert sorted(os.listdir(out)) == ["a.csv", "b.csv"]


def test_a_disk_that_fills_up_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mounted(MemoryDisk(tmp_path / "disk", "64k")) as disk:
        out = disk.path / "out"
        assert run_command(lambda: 0 if files.write_atomic(out / "a.csv", "a" * 100_000) else 1) == 1
        assert os.listdir(out) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot write {out}/a.csv: no space left on device (")
