"""A few cases of ``make soak``: trainings that are disturbed, and given again until they end with equal weights."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config.paths import ROOT

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
