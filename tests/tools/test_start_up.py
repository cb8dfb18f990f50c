"""What only lists, explains or submits does not wait for torch: each command in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

REPORT = """
import atexit, runpy, sys
atexit.register(lambda: print("loaded:", *sorted({"torch", "numba"} & set(sys.modules)), file=sys.stderr))
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "words",
    [
        "train --cfg job",
        "train epochs=abc",
        "sweep demo --list",
        "sweep methods/digits --dry-run",
        "sweep demo --backend slurm --dry-run cluster=slurm cluster.nnodes=1",
    ],
)
def test_the_command_loads_neither_torch_nor_numba(words: str, tmp_path: Path) -> None:
    module, *rest = words.split()
    settings = [f"output={tmp_path}"] if module == "sweep" and "--help" not in rest else []
    command = [sys.executable, "-c", REPORT, f"experiments.{module}", *rest, *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == (2 if "epochs=abc" in rest else 0), done.stderr
    assert done.stderr.splitlines()[-1] == "loaded:", done.stderr
