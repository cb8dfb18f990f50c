"""Real ranks on a disk that fills up: one line with the cause, no output of the agent; the same command continues."""

from pathlib import Path

import pytest

from experiments.runs.records import read_records
from tests.dist.commands import run
from tests.dist.processes import ranks
from tests.dist.rank_functions import train
from tests.finished_runs import only_run, weights_of
from tests.small_disks import MemoryDisk, mounted

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]
WORKERS = Path(__file__).parent / "workers"
WORDS = [
    *("model=mlp", "dataset=synthetic", "dataset.settings.num_samples=256", "batch_size=8", "epochs=3"),
    *("density=0.05", "checkpoint.every_s=0", "checkpoint.every_steps=10"),
]


def test_ranks_on_a_full_disk_end_with_one_line_and_go_on(tmp_path: Path) -> None:
    """The disk takes no log, no report and no failure.json."""
    assert train(*WORDS, "cluster=simulated", "cluster.world_size=2", f"output={tmp_path / 'whole'}").returncode == 0
    with mounted(MemoryDisk(tmp_path / "disk", "212k")) as disk:
        words = [*WORDS, "cluster.nproc_per_node=2", f"output={disk.path}"]
        ended = run(*words)
        assert ended.returncode == 1
        folder = only_run(disk.path)
        (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("mlp on synthetic")]
        assert line.startswith(f"error: {folder.name}: rank ")
        assert f" failed: cannot write {folder}/" in line
        assert "no space left on device (" in line
        assert "run the same command again (log: " in line
        disk.grow("10m")
        for again in ranks(2).run_apart(train, *words):
            assert again.returncode == 0, again.stderr
        assert weights_of(disk.path) == weights_of(tmp_path / "whole")
        assert [row["step"] for row in read_records(folder / "steps.jsonl")] == list(range(48))
