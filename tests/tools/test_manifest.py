"""The manifest tells what a run's numbers may depend on, and no secrets."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch

from experiments.runs.manifest import collect_manifest, git_state
from experiments.runs.records import read_records
from experiments.runs.run_folder import folder_of
from experiments.training.run import execute
from tests.tools.simulated_runs import IMAGES, configured

NOTHING = {"revision": None, "dirty": None, "diff_sha256": None}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_manifest_is_plain_and_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_API_KEY": "secret", "NCCL_NET_TOKEN": "secret", "NCCL_DEBUG": "INFO"}.items():
        monkeypatch.setenv(name, value)
    words = ["train", "dataset.root=https://me:hunter2@example.org/data", "seed=7"]
    given = {"seed": 7, "world_size": 4, "data_checksums": {"digits": "abc"}}
    manifest = collect_manifest(command=words, extra={"note": "x"}, **given)  # type: ignore[arg-type]
    text = json.dumps(manifest, allow_nan=False)
    assert json.loads(text) == manifest
    assert not {word for word in ("hunter2", "secret") if word in text}
    assert manifest["command"] == ["train", "dataset.root=https://***@example.org/data", "seed=7"]
    assert manifest["environment"]["NCCL_DEBUG"] == "INFO"
    assert {**given, "note": "x", "runs_at_once": 1}.items() <= manifest.items()
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_the_state_of_the_code_is_its_revision_and_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_state(tmp_path) == NOTHING
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == NOTHING  # no commit yet
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    revision = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "untracked").touch()
    assert git_state(tmp_path) == {"revision": revision, "dirty": False, "diff_sha256": None}
    (tmp_path / "code.py").write_text("a = 2\n")
    checksum = hashlib.sha256(git(tmp_path, "diff", "HEAD").encode()).hexdigest()
    assert git_state(tmp_path) == {"revision": revision, "dirty": True, "diff_sha256": checksum}
    git(tmp_path, "checkout", "-q", "code.py")
    (tmp_path / "conf").mkdir()
    states = []
    for text in ("name: a", "name: b"):
        (tmp_path / "conf/mine.yaml").write_text(text)
        states.append(git_state(tmp_path))
    assert all(state["dirty"] for state in states)
    assert states[0]["diff_sha256"] != states[1]["diff_sha256"]
    (tmp_path / ".gitignore").write_text("mine.yaml\n")
    assert not git_state(tmp_path)["dirty"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == NOTHING  # no git


def test_threads_change_no_more_than_rounding_and_stand_in_the_manifest(tmp_path: Path) -> None:
    losses = []
    for number in (1, 2):
        config = configured(tmp_path / str(number), *IMAGES, "batch_size=16", f"cluster.num_threads={number}")
        execute(config)
        folder = folder_of(config)
        assert json.loads(folder.manifest_path.read_text())["num_threads"] == number
        losses.append([row["loss"] for row in read_records(folder.steps_path)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
