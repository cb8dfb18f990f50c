"""The manifest tells what a run's numbers may depend on, and no secrets."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch

from experiments.runs.git_state import git_state
from experiments.runs.manifest import collect_manifest

NOTHING = {"revision": None, "dirty": None, "diff_sha256": None}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_manifest_is_plain_and_holds_no_secrets(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_API_KEY": "secret", "NCCL_NET_TOKEN": "secret", "NCCL_DEBUG": "INFO"}.items():
        monkeypatch.setenv(name, value)
    git(repository, "remote", "add", "origin", "https://me:hunter2@example.org/code.git")
    monkeypatch.setattr("experiments.runs.manifest.ROOT", repository)
    words = ["train", "dataset.root=https://me:hunter2@example.org/data", "seed=7"]
    sums = {"digits": "abc"}
    manifest = collect_manifest(seed=7, command=words, world_size=4, data_checksums=sums, extra={"note": "x"})
    text = json.dumps(manifest, allow_nan=False)
    assert json.loads(text) == manifest
    assert "hunter2" not in text
    assert "secret" not in text
    assert manifest["command"] == ["train", "dataset.root=https://***@example.org/data", "seed=7"]
    assert manifest["environment"]["NCCL_DEBUG"] == "INFO"
    assert {
        "seed": 7,
        "world_size": 4,
        "data_checksums": sums,
        "note": "x",
        "runs_at_once": 1,
    }.items() <= manifest.items()
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert manifest["git"]["revision"]


def test_git_clean_and_dirty(repository: Path) -> None:
    revision = git(repository, "rev-parse", "HEAD").strip()
    (repository / "untracked").touch()
    assert git_state(repository) == {"revision": revision, "dirty": False, "diff_sha256": None}
    (repository / "code.py").write_text("a = 2\n")
    checksum = hashlib.sha256(git(repository, "diff", "HEAD").encode()).hexdigest()
    assert git_state(repository) == {"revision": revision, "dirty": True, "diff_sha256": checksum}


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) == NOTHING
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == NOTHING  # no commit yet
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == NOTHING
