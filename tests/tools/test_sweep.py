"""What a study will run, what became of it, and what may be removed: from tiny folders, nothing is trained."""

import json
from pathlib import Path

import pytest

from experiments.config.compose import expand
from experiments.config.keys import to_yaml
from experiments.config.schema import TrainConfig
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, state_of, status_of
from experiments.sweeps import num_jobs, study
from experiments.sweeps.listing import describe, lines_of, removable, remove
from experiments.sweeps.num_jobs import num_at_once
from experiments.sweeps.rerun import compare_weights, find_run, free_folder, saved_config
from experiments.training.preflight import prepare_runs
from tests.finished_runs import finished, write_study
from tests.in_process import call
from tests.refusals import refused

TINY = ["model=mlp", "dataset=synthetic"]
WORDS = [*TINY, "cluster=simulated", "cluster.world_size=2"]


def composed(*words: str) -> TrainConfig:
    (config,) = prepare_runs([[*TINY, *words]])
    return config


def make(path: Path, files: dict[str, object]) -> RunFolder:
    """Write a run folder: JSON for values, text as it is; with DONE it has what a finished run needs at least."""
    rows = {"steps.jsonl": '{"step": 0}\n', "epochs.jsonl": '{"step": 1}\n'} if "DONE" in files else {}
    for name, content in {"config.yaml": "density: 1\n", **rows, **files}.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return finished(RunFolder(path)) if "DONE" in files else RunFolder(path)


def study_of(tmp_path: Path, grid: dict[str, list[object]]) -> str:
    return write_study(tmp_path, [*WORDS, f"output={tmp_path}/runs"], grid)


FAILURE = {"rank": 1, "message": "killed by SIGKILL", "log": "ranks/rank1/stderr.log"}
SAVED = {"step": 12, "epoch": 1, "ranks": [], "records": {}}
MEASURED = '{"step": 1, "accuracy": 0.5}\n'
# The files of a folder, its state, and how its description begins
FOLDERS: dict[str, tuple[dict[str, object], State, str]] = {
    "done": ({"DONE": {}, "failure.json": FAILURE, "epochs.jsonl": MEASURED}, State.DONE, "accuracy 0.5"),
    "failed": ({"failure.json": FAILURE}, State.FAILED, "rank 1 failed: killed by SIGKILL"),
    "torn": ({"failure.json": '{"rank"'}, State.FAILED, ""),
    "stopped": (
        {"checkpoints/step-000000012/CHECKPOINT.json": SAVED, "checkpoints/step-000000009/CHECKPOINT.json": {}},
        State.STOPPED,
        "resumes from step 12",
    ),
    "killed": ({"checkpoints/.draft-0/rank0.pt": ""}, State.STOPPED, "no checkpoint: starts from step 0"),
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
    assert describe(folder, status_of(folder)).startswith(words)


def test_the_state_of_each_run_is_a_line_and_the_last_line_counts(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, FOLDERS[name][0]) for name in ("done", "failed", "stopped")]
    waits = "SLURM 7_2, pending (PartitionTimeLimit)"
    lines = lines_of([*folders, RunFolder(tmp_path / "new")], queued=dict.fromkeys(folders[1:], waits))
    assert lines[1].endswith(f"{waits}; rank 1 failed: killed by SIGKILL")
    assert lines[2].endswith(f"{waits}; resumes from step 12")
    assert lines[-1] == "4 runs: 1 done, 2 queued, 1 not started"


def test_two_runs_of_one_folder_are_refused_by_name() -> None:
    jobs = [[*WORDS, "sparsifier=micro", f"checkpoint.keep={number}"] for number in (1, 2)]
    refused(lambda: study.distinct(jobs, prepare_runs(jobs)), "share the folder", "checkpoint.keep=1 checkpoint.keep=2")
    refused(lambda: study.distinct(jobs[:1] * 2, prepare_runs(jobs[:1] * 2)), "they are the same")


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of studies of its own."""
    monkeypatch.setattr(study, "CONF", tmp_path)
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("overrides: [a=1]", "grid"),
        ("parts: {one: {overrides: [a=1]}}", "study.yaml: one"),
        ("parts: [one]", "parts"),
        ("scales: {small: {grid: {seed: [0]}}, paper: {grid: {seed: [1]}}}", "study/small, study/paper"),
        ("overrides: [a=1]\ngrid: {seed: 3}", "grid.seed"),
        ("overrides: [a=1]\ngrid: {seed: []}", "grid.seed"),
        ("overrides: {a: 1}\ngrid: {seed: [1]}", "overrides"),
        ("overrides: [a=1\ngrid: x", "study.yaml: "),
    ],
)
def test_a_file_that_is_no_study_is_an_error_in_one_line(conf: Path, text: str, key: str) -> None:
    (conf / "study.yaml").write_text(text)
    refused(lambda: study.jobs_of("study", []), key)


def test_a_study_is_all_of_its_parts_or_one_and_a_run_of_two_parts_is_one_run(conf: Path) -> None:
    one, two = "{overrides: [epochs=3], grid: {seed: [0, 1]}}", "{grid: {seed: [1, 2], epochs: [3, 4]}}"
    (conf / "study.yaml").write_text(f"overrides: [sparsifier=topk]\nparts: {{one: {one}, two: {two}}}")
    assert study.parts_of("study") == ["study/one", "study/two"]
    assert study.jobs_of("study/one", ["lr=1"])[1] == ["sparsifier=topk", "epochs=3", "seed=1", "lr=1"]
    assert [len(study.runs_of(name, [])[1]) for name in ("study/one", "study/two", "study")] == [2, 4, 5]
    merged = study.runs_of("study", []).merged
    assert merged.startswith("6 combinations are 5 runs")
    assert "in several parts" in merged
    assert not study.runs_of("study/two", []).merged
    refused(lambda: study.jobs_of("study/tow", []), "did you mean 'two'", "tow")


def test_multirun_and_sweep_name_the_same_runs(tmp_path: Path) -> None:
    axes: dict[str, list[object]] = {"seed": ["0", "1"], "sparsifier": ["dense", "topk"], "density": ["0.1", "0.01"]}
    path = study_of(tmp_path, axes)
    multirun = expand([*WORDS, f"output={tmp_path}/runs", *(f"{k}={','.join(map(str, v))}" for k, v in axes.items())])
    ways = [study.distinct(jobs, prepare_runs(jobs))[1] for jobs in (study.jobs_of(path, []), multirun)]
    assert ways[0] == ways[1]
    assert len(ways[0]) == 2 + 4  # dense is one run, whatever the density
    merged = study.runs_of(path, []).merged
    assert merged.startswith("8 combinations are 6 runs")
    assert merged.count("sends everything") == 2


def test_as_many_runs_at_once_as_the_cores_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(num_jobs, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one = composed("cluster=simulated", "cluster.device=cpu")
    three = composed("cluster=simulated", "cluster.device=cpu", "cluster.num_threads=3")
    four = composed("cluster.device=cpu", "cluster.nproc_per_node=4")
    nodes = composed("cluster=nodes", "cluster.rdzv_endpoint=localhost:2999", "cluster.nnodes=2", "cluster.device=cpu")
    expected = {8: [one] * 20, 3: [one] * 3, 2: [one, four] * 20, 1: []}
    assert {number: num_at_once(configs, "auto") for number, configs in expected.items()} == {n: n for n in expected}
    assert num_at_once([four] * 20, "5") == 5
    assert num_at_once([three] * 20, "auto") == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert [num_at_once([config] * 20, "auto") for config in (one, four, nodes)] == [2, 1, 1]
    refused(lambda: num_at_once([nodes], "2"), "--jobs 1", 2)


def test_clean_takes_what_failed_or_was_broken_off_and_never_what_runs(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, files) for name, (files, _, _) in FOLDERS.items()]
    chosen = removable(folders)
    assert {folder.path.name for folder in chosen} == set(FOLDERS) - {"done"}
    assert removable(folders, finished_too=True) == folders
    with chosen[0].claim():
        assert chosen[0] not in removable(folders)
        assert remove(chosen) == chosen[:1]
    assert {path.name for path in tmp_path.iterdir()} == {"done", chosen[0].path.name}


def test_clean_asks_and_keeps_finished_runs(tmp_path: Path) -> None:
    path = study_of(tmp_path, {"seed": [0, 1]})
    done, failed = (folder_of(config).path for config in study.runs_of(path, [])[1])
    make(done, {"DONE": {}})
    make(failed, {"failure.json": FAILURE})
    refused(["sweep", "clean", path], "add --yes")  # nobody is at the terminal
    assert failed.exists()
    assert call(["sweep", "clean", path, "--yes"]).code == 0
    assert (done.exists(), failed.exists()) == (True, False)
    assert call(["sweep", "clean", path, "--yes", "--all"]).code == 0
    assert not done.exists()


def test_a_rerun_takes_the_saved_configuration_and_a_place_of_its_own(tmp_path: Path) -> None:
    config = composed("cluster=simulated", "seed=3", f"output={tmp_path}")
    original = make(folder_of(config).path, {"config.yaml": to_yaml(config), "DONE": {"weights_sha256": "a"}})
    name = original.path.name
    assert find_run(name, tmp_path) == find_run(str(original.path), Path("nowhere")) == original
    refused(lambda: find_run(f"{name}x", tmp_path), "did you mean", name)
    assert saved_config(original, []) == config
    assert saved_config(original, ["dataset.root=/data", "checkpoint.keep=5"]).dataset.root == "/data"
    refused(lambda: saved_config(original, ["seed=4"]), "rerun", "seed=4")
    refused(lambda: saved_config(original, ["tracking=wandb"]), "tracking=wandb", "tracking.KEY")
    first = free_folder(original.path)
    assert first.path.name == f"{name}-rerun-1"
    make(first.path, FOLDERS["stopped"][0])
    assert free_folder(original.path) == first  # it goes on
    make(first.path, {"DONE": {"weights_sha256": "b"}})
    assert free_folder(original.path).path.name == f"{name}-rerun-2"
    assert "other weights" in compare_weights(original, first)
    assert "the same weights" in compare_weights(original, original)
