"""A few cases of `tests.soak`: disturbed trainings that end with equal weights, and methods over many steps."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import ROOT

CASES = ["--seed", "235", "--cases", "3", "--kinds", "simulated,local", "--methods", "micro,topk"]
FAULTS = "signal,pause,full,twice,torn"  # the others wait for a time limit


@pytest.mark.skipif(sys.platform != "linux", reason="the soak needs Linux")
@pytest.mark.timeout(1200)
def test_disturbed_trainings_end_with_equal_weights(tmp_path: Path) -> None:
    words = ["-m", "tests.soak", *CASES, "--faults", FAULTS, "--time", "15m", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 cases, 0 failed" in done.stdout
    assert not [*tmp_path.iterdir()]  # nothing of a failed case was kept


def test_methods_hold_their_laws_over_many_steps_and_nothing_drifts() -> None:
    rows = ["micro+agreed", "topk+union", "int8+union"]
    words = ["-m", "tests.long_laws", "--steps", "1000", "--rows", ",".join(rows)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.partition(",")[0] for line in done.stdout.splitlines()[:-1]) == sorted(rows)
