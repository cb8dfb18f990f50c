"""What a study will run, what became of it, and what may be removed: from tiny folders, nothing is trained."""

import fcntl
import io
import json
import os
import sys
from pathlib import Path

import pytest

from experiments import sweep
from experiments.config.errors import UserError
from experiments.config.overrides import expand
from experiments.config.schema import TrainConfig, to_yaml
from experiments.runs.cleaning import removable, remove
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, state_of
from experiments.sweeps import num_jobs, study
from experiments.sweeps.listing import describe, lines_of
from experiments.sweeps.num_jobs import num_at_once
from experiments.sweeps.rerun import compare_weights, find_run, free_folder, saved_config
from experiments.training.preflight import prepare_runs
from tests.finished_runs import finished
from tests.refusals import refused

WORDS = ["model=mlp", "dataset=synthetic", "cluster=simulated", "cluster.world_size=2"]


def composed(*grid: list[str], words: list[str] = WORDS) -> list[TrainConfig]:
    return prepare_runs([*words, *job] for job in grid)


def make(path: Path, files: dict[str, object]) -> RunFolder:
    """Write a run folder: JSON for values, text as it is; with DONE it has what a finished run needs at least."""
    rows = {"steps.jsonl": '{"step": 0}\n', "epochs.jsonl": '{"step": 1}\n'} if "DONE" in files else {}
    for name, content in {"config.yaml": "density: 1\n", **rows, **files}.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return finished(RunFolder(path)) if "DONE" in files else RunFolder(path)


FAILURE = {"rank": 1, "message": "killed by SIGKILL", "log": "ranks/rank1/stderr.log"}
SAVED = {"step": 12, "ranks": [], "records": {}}
FOLDERS: dict[str, tuple[dict[str, object], State, str]] = {
    "done": (
        {"DONE": {}, "failure.json": FAILURE, "epochs.jsonl": '{"step": 1, "accuracy": 0.5}\n'},
        State.DONE,
        "accuracy 0.5",
    ),
    "failed": ({"failure.json": FAILURE}, State.FAILED, "rank 1 failed: killed by SIGKILL"),
    "torn": ({"failure.json": '{"rank"'}, State.FAILED, ""),
    "stopped": (
        {"checkpoints/step-000000012/CHECKPOINT.json": SAVED, "checkpoints/step-000000009/CHECKPOINT.json": {}},
        State.STOPPED,
        "resumes from step 12",
    ),
    "killed": ({"checkpoints/.draft-step-000000012/rank0.pt": ""}, State.STOPPED, "no checkpoint: starts from step 0"),
    "damaged": (
        {"checkpoints/step-000000012/rank0.pt": "", "failure.json": FAILURE},
        State.DAMAGED,
        "no checkpoint can be used: ",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_tells_its_state(tmp_path: Path, name: str) -> None:
    files, state, words = FOLDERS[name]
    folder = make(tmp_path / name, files)
    assert state_of(folder) == state
    assert describe(folder).startswith(words)


def test_a_folder_that_is_owned_is_running_and_a_question_takes_no_lock(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", {"failure.json": FAILURE})
    assert not folder.is_locked()
    with folder.claim():
        assert folder.is_locked()
        assert state_of(folder) == State.RUNNING
    descriptor = os.open(folder.path / ".lock", os.O_RDWR)
    try:
        assert state_of(folder) == State.STOPPED  # the claim put the failure aside
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
    assert state_of(RunFolder(tmp_path / "nowhere")) == State.NEW


def test_the_state_of_each_run_is_a_line_and_the_last_line_counts(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, FOLDERS[name][0]) for name in ("done", "failed", "stopped")]
    lines = lines_of([*folders, RunFolder(tmp_path / "new")], queued=folders[1:])
    assert [line.split()[0] for line in lines] == ["done", "queued", "queued", "not", "4"]
    assert lines[1].endswith("rank 1 failed: killed by SIGKILL")
    assert lines[-1] == "4 runs: 1 done, 2 queued, 1 not started"


def test_two_runs_of_one_folder_are_refused_by_name_but_dense_is_one_run() -> None:
    jobs = [[*WORDS, "sparsifier=dense", f"density={density}"] for density in (0.1, 0.01)]
    kept, configs = study.distinct(jobs, prepare_runs(jobs))
    assert kept == jobs[:1]
    assert len(configs) == 1
    jobs = [[*WORDS, "sparsifier=micro", f"checkpoint.keep={number}"] for number in (1, 2)]
    with pytest.raises(
        UserError, match=r"share the folder mlp-synthetic-micro-.*checkpoint\.keep=1 checkpoint\.keep=2"
    ):
        study.distinct(jobs, prepare_runs(jobs))
    with pytest.raises(UserError, match="they are the same"):
        study.distinct(jobs[:1] * 2, prepare_runs(jobs[:1] * 2))


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of studies of its own."""
    monkeypatch.setattr(study, "CONF", tmp_path)
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overrides: [a=1]", "must have the keys overrides and grid"),
        ("parts: {one: {overrides: [a=1]}}", "study.yaml: one must have the keys overrides and grid"),
        ("parts: [one]", "must have a mapping of parts or scales"),
        ("scales: {small: {grid: {seed: [0]}}, paper: {grid: {seed: [1]}}}", "study/small, study/paper"),
        ("overrides: [a=1]\ngrid: {seed: 3}", "grid.seed must be a list of values, got 3"),
        ("overrides: [a=1]\ngrid: {seed: []}", "grid.seed must be a list"),
        ("overrides: {a: 1}\ngrid: {seed: [1]}", "overrides must be a list of words"),
        ("overrides: [a=1\ngrid: x", "study.yaml: "),
    ],
)
def test_a_file_that_is_no_study_is_told_in_one_line(conf: Path, text: str, message: str) -> None:
    (conf / "study.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        study.jobs_of("study", [])
    assert "\n" not in str(caught.value)


def test_a_study_is_all_of_its_parts_or_one_and_a_run_of_two_parts_is_one_run(conf: Path) -> None:
    one, two = "{overrides: [epochs=3], grid: {seed: [0, 1]}}", "{grid: {seed: [1, 2], epochs: [3, 4]}}"
    (conf / "study.yaml").write_text(f"overrides: [sparsifier=topk]\nparts: {{one: {one}, two: {two}}}")
    assert study.parts_of("study") == ["study/one", "study/two"]
    assert study.jobs_of("study/one", ["lr=1"])[1] == ["sparsifier=topk", "epochs=3", "seed=1", "lr=1"]
    assert [len(study.runs_of(name, [])[1]) for name in ("study/one", "study/two", "study")] == [2, 4, 5]
    with pytest.raises(UserError, match=r"got 'tow'; did you mean 'two'"):
        study.jobs_of("study/tow", [])


def test_multirun_and_sweep_name_the_same_runs(tmp_path: Path) -> None:
    axes = {"seed": ["0", "1"], "sparsifier": ["dense", "topk"], "density": ["0.1", "0.01"]}
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps({"overrides": WORDS, "grid": axes}))
    multirun = expand([*WORDS, *(f"{key}={','.join(values)}" for key, values in axes.items())])
    ways = [study.distinct(jobs, prepare_runs(jobs))[1] for jobs in (study.jobs_of(str(path), []), multirun)]
    assert ways[0] == ways[1]
    assert len(ways[0]) == 2 + 4  # dense is one run, whatever the density


@pytest.mark.parametrize("axis", ["density: [0.1, 0.01, 3]", "sparsifier: [micro, topk, mikro]", "epochs: [1, 0]"])
def test_the_last_value_of_an_axis_is_refused_before_the_first_run(
    tmp_path: Path, axis: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"overrides: {json.dumps([*WORDS, f'output={tmp_path}/runs'])}\ngrid: {{{axis}}}")
    monkeypatch.setattr(sys, "argv", ["sweep", str(path)])
    with pytest.raises(SystemExit, match="2"):
        sweep.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert axis.partition(":")[0] in line
    assert not (tmp_path / "runs").exists()


def test_as_many_runs_at_once_as_the_cores_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(num_jobs, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = ["model=mlp", "dataset=synthetic", "cluster.device=cpu"]
    one_process = composed(["cluster=simulated"], words=words) * 20
    four = composed(["cluster.nproc_per_node=4"], words=words) * 20
    assert num_at_once(one_process, "auto") == 8
    assert num_at_once(one_process[:3], "auto") == 3
    assert num_at_once([*one_process, *four], "auto") == 2
    assert num_at_once(four, "5") == 5
    assert num_at_once([], "auto") == 1
    assert num_at_once(composed(["cluster=simulated", "cluster.num_threads=3"], words=words) * 20, "auto") == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert num_at_once(one_process, "auto") == 2
    assert num_at_once(four, "auto") == 1
    nodes = composed(["cluster=nodes", "cluster.rdzv_endpoint=localhost:2999", "cluster.nnodes=2"], words=words)
    assert num_at_once(nodes, "auto") == 1
    with pytest.raises(UserError, match="use --jobs 1"):
        num_at_once(nodes, "2")


def test_clean_takes_what_failed_or_was_broken_off_and_never_what_runs(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, files) for name, (files, _, _) in FOLDERS.items()]
    chosen = removable(folders)
    assert {folder.path.name for folder in chosen} == set(FOLDERS) - {"done"}
    assert removable(folders, finished_too=True) == folders
    with chosen[0].claim():
        assert chosen[0] not in removable(folders)
        assert remove(chosen) == chosen[:1]
    assert {path.name for path in tmp_path.iterdir()} == {"done", chosen[0].path.name}


def test_clean_asks_and_keeps_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps({"overrides": [*WORDS, f"output={tmp_path}/runs"], "grid": {"seed": [0, 1]}}))

    def clean(*words: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["sweep", "clean", str(path), *words])
        with pytest.raises(SystemExit) as caught:
            sweep.main()
        return caught.value.code

    done, failed = (folder_of(config).path for config in study.runs_of(str(path), [])[1])
    make(done, {"DONE": {}})
    make(failed, {"failure.json": FAILURE})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert clean() == 2  # nobody is at the terminal
    assert failed.exists()
    assert "add --yes" in capsys.readouterr().err
    assert clean("--yes") == 0
    assert done.exists()
    assert not failed.exists()
    assert clean("--yes", "--all") == 0
    assert not done.exists()


def test_a_rerun_takes_the_saved_configuration_and_a_place_of_its_own(tmp_path: Path) -> None:
    (config,) = composed(["sparsifier=micro", "seed=3", f"output={tmp_path}"])
    original = make(folder_of(config).path, {"config.yaml": to_yaml(config), "DONE": {"weights_sha256": "a"}})
    assert find_run(original.path.name, tmp_path) == find_run(str(original.path), Path("nowhere")) == original
    assert saved_config(original, []) == config
    assert saved_config(original, ["dataset.root=/data", "checkpoint.keep=5"]).dataset.root == "/data"
    with pytest.raises(UserError, match="got 'seed=4'"):
        saved_config(original, ["seed=4"])
    first = free_folder(original.path)
    assert first.path.name == f"{original.path.name}-rerun-1"
    make(first.path, FOLDERS["stopped"][0])
    assert free_folder(original.path) == first  # it goes on
    make(first.path, {"DONE": {"weights_sha256": "b"}})
    assert free_folder(original.path).path.name == f"{original.path.name}-rerun-2"
    assert compare_weights(original, first) == f"ended with other weights than {original.path.name}"
    assert compare_weights(original, original).startswith("ended with the same weights")


def test_a_configuration_of_another_version_is_told_in_one_line(tmp_path: Path) -> None:
    for text in ("model: {name: mlp}", "[1]", "model: {", "sede: 1"):
        folder = make(tmp_path / "run", {"config.yaml": text})
        with pytest.raises(UserError, match=r"run/config\.yaml") as caught:
            saved_config(folder, [])
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="did you mean 'run'"):
        find_run("runn", tmp_path)


@pytest.mark.parametrize(
    ("command", "key", "given"),
    [
        ("sweep demo --jobs many", "--jobs", "many"),
        ("sweep demo --jobs 0", "--jobs", "0"),
        ("sweep demo jobs=4", "jobs", "'jobs'"),
        ("sweep demo --jbos 4", "--jbos", "4"),
        ("sweep demo --backend pbs", "--backend", "pbs"),
        ("sweep demo sparsifier=mikro", "did you mean 'micro'", "mikro"),
        ("sweep status dmeo", "did you mean 'demo'", "dmeo"),
        ("sweep rerun nothing", "name the folder of a run", "nothing"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command: str, key: str, given: str) -> None:
    refused(command, key, given)
