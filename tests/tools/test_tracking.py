"""A mirror at W&B says what the run folder says, and never stands in the way of a run."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

pytest.importorskip("wandb")
import wandb

from experiments import figures, track
from experiments.config import ROOT
from experiments.config.errors import UserError
from experiments.config.schema import TrackingConfig
from experiments.reports.frames import Frames, load
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.tracking import wandb_mirror
from experiments.tracking.sources import read
from experiments.tracking.wandb_mirror import live_mirror, mirror
from experiments.training.preflight import prepare_runs
from experiments.training.run import execute
from tests.refusals import refused
from tests.wandb_files import read_file, read_files

TINY = ["model=mlp", "cluster=simulated", "cluster.world_size=2", "epochs=1", "batch_size=64", "checkpoint.every_s=0"]
OFFLINE = ["tracking=wandb", "tracking.mode=offline"]
TRACKING = TrackingConfig(name="wandb", mode="offline", project="micro")
KEY = "k" * 40
SECRET = "hunter2-is-in-the-environment"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No key, no settings and no server of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    wandb.teardown()  # it reads the environment once
    yield
    wandb.teardown()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run, mirrored to files while it ran."""
    root, elsewhere = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("elsewhere")
    (config,) = prepare_runs([[*TINY, *OFFLINE, f"output={root}"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        patch.setenv("SOME_TOKEN", SECRET)
        assert execute(config)
    assert mirrors(folder_of(config))
    assert not list(elsewhere.iterdir())  # nothing is written where the user stands
    return root


def assert_same(runs: Path, other: Frames) -> None:
    one = load(runs)
    assert len(one.steps) > 5
    for table in ("runs", "steps", "epochs"):
        pd.testing.assert_frame_equal(getattr(one, table), getattr(other, table), check_exact=True)


def copied(runs: Path, to: Path) -> RunFolder:
    """Copy the one run without its mirror."""
    shutil.copytree(runs, to, ignore=shutil.ignore_patterns("wandb"))
    (folder,) = (RunFolder(path.parent) for path in to.glob("*/config.yaml"))
    return folder


def mirrors(folder: RunFolder) -> list[Path]:
    return list(folder.path.glob("wandb/offline-run-*"))


def test_folder_files_and_server_say_the_same(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(runs, read_files(runs))
    (file,) = (path for path in runs.rglob("*.wandb") if path.is_file())
    kept = read_file(file)

    class Api:
        """What the server of W&B says of one run; ``lab/none`` is no project."""

        def runs(self, project: str, **_: object) -> list[SimpleNamespace]:
            if project != "lab/micro":
                raise ValueError(f"no project {project}")
            held = {"id": kept.name, "state": "finished", "config": {**kept.mirrored}}
            return [SimpleNamespace(scan_history=lambda use_cache: iter(kept.history()), **held)]

    monkeypatch.setattr(wandb, "Api", Api)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    assert_same(runs, read(["wandb", "lab/micro"], {"model": ["mlp"]}))
    refused(lambda: read(["wandb", "lab/none"]), "W&B", "lab/none")
    assert figures.main(["--source", "wandb", "lab/micro", "--table", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "summary.csv").exists()


def test_neither_run_nor_mirror_holds_the_environment_or_the_address_of_the_repository(runs: Path) -> None:
    command = ["git", "config", "remote.origin.url"]
    origin = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    contents = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    assert any(path.suffix == ".wandb" for path in contents)
    for path, content in contents.items():
        assert SECRET.encode() not in content, path
        assert not origin.startswith(("http", "git@", "ssh")) or origin.encode() not in content, path


def test_a_mirror_is_made_again_from_the_folder_alone_and_one_that_fails_leaves_it(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(runs, tmp_path / "again")
    for _ in range(2):
        assert track.main([str(folder.path)]) == 0
    (before,) = mirrors(folder)
    with pytest.raises(wandb.Error):  # W&B refuses this name
        mirror(folder, TrackingConfig(name="wandb", mode="offline", project="a/b"))

    def interrupt(folder: RunFolder) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "is_done", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mirror(folder, TRACKING)
    assert mirrors(folder) == [before]
    assert_same(runs, read_files(tmp_path / "again"))


def test_runs_with_the_same_id_are_distinguished_by_their_folders(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [copied(runs, tmp_path / "agents" / str(seed)) for seed in (0, 1)]
    content = folders[1].config_path.read_text()
    folders[1].config_path.write_text(content.replace("seed: 0", "seed: 1"))
    folders[1] = RunFolder(folders[1].path.rename(folders[1].path.with_name("other")))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    for identifier in ("first", "resumed"):  # an agent gives a run that it starts again another id
        monkeypatch.setenv("WANDB_RUN_ID", identifier)
        for folder in folders:
            wandb.teardown()
            mirror(folder, TRACKING)
    assert [[path.name.rpartition("-")[2] for path in mirrors(folder)] for folder in folders] == [["resumed"]] * 2
    found = read_files(tmp_path / "agents")
    assert sorted(found.runs["run"]) == sorted(folder.path.name for folder in folders)
    assert found.runs["seed"].nunique() == 2


def test_a_resumed_run_has_no_step_twice(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path / "resumed")
    whole = {path: path.read_text() for path in (folder.steps_path, folder.epochs_path, folder.done_path)}
    rows = whole[folder.steps_path].splitlines(keepends=True)
    folder.done_path.unlink()
    folder.epochs_path.write_text("")
    for first, last in ((0, 5), (3, None)):  # the second begins at an earlier step than that at which the first ended
        folder.steps_path.write_text("".join(rows[:first]))
        with live_mirror(folder, TRACKING) as show:
            assert show
            for row in rows[first:last]:
                show("steps", json.loads(row))
            for row in whole[folder.epochs_path].splitlines() if first else ():
                show("epochs", json.loads(row))
            for path, text in whole.items() if first else ():
                path.write_text(text)
    assert len(mirrors(folder)) == 1
    assert_same(runs, read_files(tmp_path / "resumed"))


def assert_one_warning(said: str, folder: RunFolder) -> None:
    assert folder.is_done()
    (line,) = said.splitlines()
    assert line.startswith("warning: ")
    assert f"experiments.track {folder.path}" in line


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_dead_server_does_not_hurt_the_run(
    is_silent: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_mirror, "INIT_S", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_silent:  # takes connections and never answers
            listener.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        wandb.teardown()
        (config,) = prepare_runs([[*TINY, *OFFLINE, f"output={tmp_path / 'runs'}"]])
        config.tracking.mode = "online"
        started = time.monotonic()
        assert execute(config)
        assert time.monotonic() - started < 60
    assert_one_warning(capsys.readouterr().err, folder_of(config))


def test_a_folder_that_cannot_be_mirrored_is_one_line(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path / "broken")
    with folder.locked():  # its run goes on, and mirrors itself
        refused(["track", str(folder.path)], "is in use by pid", os.getpid())
    folder.steps_path.write_text("{torn\n")
    refused(["track", str(folder.path)], "steps.jsonl", folder.path.name)
    folder.config_path.unlink()
    refused(["track", str(folder.path)], "config.yaml", folder.path.name)
    assert not mirrors(folder)


def test_files_that_were_cut_off_or_are_none_are_one_line(runs: Path, tmp_path: Path) -> None:
    (whole,) = (path for path in runs.rglob("*.wandb") if path.is_file())
    cut = tmp_path / "cut" / whole.parent.name / whole.name
    cut.parent.mkdir(parents=True)
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    refused(lambda: read_files(tmp_path / "cut"), "holds no finished run", "1 unfinished")
    cut.write_bytes(json.dumps({"no": "such format"}).encode())
    refused(lambda: read_files(tmp_path / "cut"), "cannot read", cut)


def test_a_server_without_a_key_is_refused_before_anything_starts() -> None:
    words = [*TINY, "tracking=wandb", "tracking.mode=online"]
    refused(lambda: prepare_runs([words]), "or use tracking.mode=offline", "WANDB_API_KEY", error=UserError)


@pytest.mark.parametrize(
    ("source", "key", "given"),
    [
        (["wandbs", "x"], "did you mean 'wandb'", "wandbs"),
        (["wandb", "lab/micro"], "or draw from the run folders", "WANDB_API_KEY"),
        (["wandb-files", "x"], "was removed", "wandb sync"),
    ],
)
def test_a_source_that_is_none_is_one_line(source: list[str], key: str, given: str) -> None:
    refused(lambda: read(source), key, given)
