"""Commands as a user types them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


def run(
    *words: str, module: tuple[str, ...] = ("-m", "experiments.train"), **env: str
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, *module, *words]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
