"""A few cases of ``make soak``: trainings that are disturbed, and given again until they end with equal weights."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config.paths import ROOT

CASES = ["--seed", "235", "--cases", "3", "--kinds", "simulated,local", "--methods", "micro,topk"]
FAULTS = "signal,pause,clock,full,twice,torn"  # the others wait for a time limit


@pytest.mark.skipif(sys.platform != "linux", reason="the soak needs Linux")
@pytest.mark.timeout(1200)
def test_disturbed_trainings_end_with_equal_weights(tmp_path: Path) -> None:
    """A case on two ranks, both of which are killed, and two on simulated ranks."""
    words = ["-m", "tests.soak", *CASES, "--faults", FAULTS, "--time", "15m", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3: 2 simulated, 1 local" in done.stdout
    assert done.stdout.count("equal") >= 3, done.stdout
    assert not [*tmp_path.iterdir()]  # nothing of a failed case was kept
