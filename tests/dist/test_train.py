"""The command as a user types it; its main function is called where its own process does not matter."""

import json
import socket
from pathlib import Path

import pytest
import torch

from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder
from experiments.sweeps.rerun import saved_config
from tests.dist.commands import run
from tests.dist.processes import ranks
from tests.dist.rank_functions import join_where_the_folder_fails, train
from tests.finished_runs import only_run

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
SMALL = ["model=mlp", "epochs=2", "batch_size=64", "dataset.settings={num_samples: 512, image_size: 8, num_classes: 4}"]


def test_a_run_leaves_all_that_is_promised_and_is_not_run_twice(tmp_path: Path) -> None:
    words = ("dataset=synthetic", *SMALL, f"output={tmp_path}", "density=0.05")
    first = run(*words)
    assert first.returncode == 0, first.stderr
    folder = only_run(tmp_path)
    steps, epochs = read_records(folder / "steps.jsonl"), read_records(folder / "epochs.jsonl")
    assert [row["step"] for row in steps] == list(range(8))
    assert [row["epoch"] for row in epochs] == [0, 1]
    assert all(row["density_error"] == 0 and row["rule"] == "agreed" for row in steps)
    parts = ("compute_s", "select_s", "exchange_s", "rest_s")
    assert all(abs(sum(row[part] for part in parts) - row["step_s"]) < 1e-6 for row in steps)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["seed"]) == (2, 0)
    assert torch.__version__.startswith(manifest["versions"]["torch"])
    assert manifest["data_checksums"]
    summary = json.loads((folder / "DONE").read_text())
    assert summary["accuracy"] == epochs[-1]["accuracy"]
    again = train(*words)
    assert again.returncode == 0
    assert again.stdout.startswith("already done")


def test_what_fails_on_rank_0_before_the_first_step_ends_all_ranks(tmp_path: Path) -> None:
    raised = ranks(2).run_apart(join_where_the_folder_fails, "model=mlp", "dataset=synthetic", f"output={tmp_path}")
    assert all("RecursionError: injected" in message for message in raised)


def test_the_layout_that_torchrun_gave_is_recorded_so_that_the_run_can_be_repeated(tmp_path: Path) -> None:
    ended = ranks(3).run_apart(train, "dataset=synthetic", *SMALL, "epochs=1", f"output={tmp_path}")
    assert [each.returncode for each in ended] == [0, 0, 0]
    cluster = saved_config(RunFolder(only_run(tmp_path)), []).cluster
    assert (cluster.world_size, cluster.nproc_per_node, cluster.nnodes) == (3, 3, 1)


ROUNDS = ("rounds.every=4", "optimizer=adam", "lr=0.005", "rounds.fragments=2", "rounds.delay=1", "rounds.mix=0.8")
CLIPPED = ("optimizer.clip=0.5", "optimizer.clip_norm=global")


@pytest.mark.parametrize(
    ("method", "settings"),
    [("dense", ()), ("micro", CLIPPED), ("micro", ROUNDS)],
    ids=["dense", "micro clipped", "streaming rounds"],
)
def test_simulated_ranks_equal_real_ones(tmp_path: Path, method: str, settings: tuple[str, ...]) -> None:
    words = [f"sparsifier={method}", "epochs=1", "density=0.02", "batch_size=40", *settings]
    real = ranks(3).run_apart(train, *words, "cluster.nproc_per_node=3", f"output={tmp_path / 'real'}")
    simulated = train(*words, "cluster=simulated", "cluster.world_size=3", f"output={tmp_path / 'simulated'}")
    assert {ended.returncode for ended in (*real, simulated)} == {0}, (real, simulated)
    first, second = (read_records(only_run(tmp_path / kind) / "steps.jsonl") for kind in ("real", "simulated"))
    assert len(first) == len(second) == 11
    for one, other in zip(first, second, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert (one["density"] or 0.0) == pytest.approx(other["density"] or 0.0, rel=0.02)
        assert one["counts_bytes"] == other["counts_bytes"]


def test_it_joins_the_ranks_of_torchrun(tmp_path: Path) -> None:
    words = ("dataset=synthetic", *SMALL, f"output={tmp_path}")
    assert [ended.returncode for ended in ranks(2).run_apart(train, *words)] == [0, 0]
    assert (only_run(tmp_path) / "DONE").exists()
    assert json.loads((only_run(tmp_path) / "manifest.json").read_text())["processes"] == {socket.gethostname(): 2}
    again, silent = ranks(2).run_apart(train, *words)
    assert again.stdout.startswith("already done")
    assert silent.stdout == ""
    own_start = train(*words)
    assert own_start.stdout == again.stdout
    for refused in ranks(2).run_apart(train, "-m", *words, "seed=0,1"):
        assert refused.returncode == 2
        assert "call it without torchrun or srun" in refused.stderr
