"""The manifest tells what a run's numbers may depend on, and no secrets."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.runs.git_state import git_state
from experiments.runs.manifest import collect_manifest

NOTHING = {"revision": None, "dirty": None, "diff_sha256": None}


def collect(**extra: Any) -> dict[str, Any]:
    return collect_manifest(
        seed=7, command=["train", "seed=7"], world_size=4, data_checksums={"digits": "abc"}, extra=extra
    )


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


def test_a_manifest_is_plain_and_complete() -> None:
    manifest = collect(note="x")
    assert json.loads(json.dumps(manifest, allow_nan=False)) == manifest
    assert (manifest["seed"], manifest["world_size"], manifest["command"]) == (7, 4, ["train", "seed=7"])
    assert manifest["data_checksums"] == {"digits": "abc"}
    assert manifest["note"] == "x"
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert manifest["started"].endswith("+00:00")
    assert manifest["num_threads"] == torch.get_num_threads()
    assert manifest["packages"]["torch"] == manifest["versions"]["torch"]
    assert len(manifest["load_average"]) == 3
    assert manifest["runs_at_once"] == 1


def test_the_environment_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("NCCL_NET_PLUGIN_TOKEN", "secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    manifest = collect()
    environment = manifest["environment"]
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "secret" not in json.dumps(manifest)


def test_the_command_and_the_remote_hold_no_passwords(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository, "remote", "add", "origin", "https://me:hunter2@example.org/code.git")
    monkeypatch.setattr("experiments.runs.manifest.ROOT", repository)
    words = ["train", "dataset.root=https://me:hunter2@example.org/data", "seed=7"]
    manifest = collect_manifest(seed=7, command=words, world_size=1, data_checksums={}, extra={})
    assert manifest["git"]["revision"]
    assert "hunter2" not in json.dumps(manifest)
    assert manifest["command"] == ["train", "dataset.root=https://***@example.org/data", "seed=7"]


def test_git_clean_and_dirty(repository: Path) -> None:
    revision = git(repository, "rev-parse", "HEAD").strip()
    (repository / "untracked").touch()
    assert git_state(repository) == {"revision": revision, "dirty": False, "diff_sha256": None}
    (repository / "code.py").write_text("a = 2\n")
    difference = git(repository, "diff", "HEAD")
    checksum = hashlib.sha256(difference.encode()).hexdigest()
    assert git_state(repository) == {"revision": revision, "dirty": True, "diff_sha256": checksum}
    git(repository, "add", ".")
    assert git_state(repository)["dirty"] is True


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) == NOTHING
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == NOTHING  # no commit yet
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == NOTHING
