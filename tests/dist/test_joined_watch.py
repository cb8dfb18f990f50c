"""Ranks that torchrun or srun started, which have no launcher of ours, watch each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.launching.process_lifetime import kill_all
from experiments.launching.watching.stall_report import read_stall_report
from tests.dist.commands import ROOT
from tests.waiting import LIMIT_S

WORKER = Path(__file__).parent / "workers/watched_worker.py"

pytestmark = pytest.mark.dist


def test_a_rank_that_stands_still_is_ended_by_the_first_of_the_others(tmp_path: Path) -> None:
    words = [sys.executable, str(WORKER), str(tmp_path)]
    started = [
        subprocess.Popen([*words, str(rank), "20"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1].decode() for process in started]
    finally:
        kill_all(started)
    assert [process.returncode for process in started] == [1, -9]
    report = read_stall_report(tmp_path)
    assert report is not None
    assert report.rank == 1
    assert "stood still for " in report.message
    assert "at watched_worker.py:" in report.message
    assert "rank 0 waited in all_reduce for " in report.message
    assert errors == [f"error: {tmp_path.name}: rank 1 failed: {report.message}\n", ""]
