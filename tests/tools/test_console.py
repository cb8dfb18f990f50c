"""The command micro-train as pip installs it: completed by a shell, called from anywhere, and not part of a wheel."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPLETE = """
eval "$(micro-train -sc install=bash)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_WORDS=($1) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
hydra_bash_completion 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""

pytest.importorskip("setuptools", minversion="77")
pytest.importorskip("pip")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, for what a build leaves behind."""
    copy = tmp_path_factory.mktemp("repository")
    for name in ("micro", "experiments", "models", "data", "conf"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "cache"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def environment(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a virtual environment with an editable install of the copy, and with this one's packages."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    place = sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)})
    (Path(place) / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip("--python", str(folder / "bin" / "python"), "install", "--editable", str(repository))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**clean, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def pip(*words: str) -> None:
    quiet = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    done = subprocess.run([sys.executable, "-m", "pip", *words, *quiet], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("micro-train se", {"seed="}),
        ("micro-train sparsifier=mi", {f"sparsifier={path.stem}" for path in (ROOT / "conf/sparsifier").glob("mi*")}),
        ("micro-train -m model=resnet11", {"model=resnet110"}),
        ("micro-train density=0.1 sparsifier=topk sparsifier.exch", {"sparsifier.exchange="}),
    ],
)
def test_bash_completes_groups_choices_and_keys(
    line: str, offered: set[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """Bash offers this for the last word of a line, by the rule that the command installs."""
    command = ["bash", "--norc", "-c", COMPLETE, "bash", line]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


def test_a_wheel_holds_the_library_and_no_command(repository: Path, tmp_path: Path) -> None:
    pip("wheel", str(repository), "--wheel-dir", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"micro", "micro_sparse"}
    assert "micro/kernels/cpu.py" in names
    assert not any(name.endswith("entry_points.txt") for name in names)
