"""What a study will run, what became of it, and what may be removed: from tiny folders, nothing is trained."""

import fcntl
import io
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from experiments import sweep
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig, to_yaml
from experiments.runs.cleaning import removable, remove
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.saved_run import code_differences, compare_weights, find_run, saved_config
from experiments.runs.status import State, failure_log, state_of
from experiments.sweeps import held_runs, num_jobs, sequential_runs, study
from experiments.sweeps.live_table import LiveTable
from experiments.sweeps.num_jobs import num_at_once
from experiments.sweeps.outcome import Outcome
from experiments.sweeps.parallel_runs import ParallelSweep
from experiments.sweeps.rerun import free_folder
from experiments.sweeps.summaries import describe, plan_table, status_table
from experiments.training.preflight import prepare_runs

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
    return RunFolder(path)


FAILURE = {"rank": 1, "message": "killed by SIGKILL", "log": "ranks/rank1/stderr.log"}
REPORT = {"rank": 0, "type": "NonFiniteGradient", "message": "fc.weight is\nnot finite"}
SAVED = {"step": 12, "parts": [], "records": {kind: {"rows": 0, "sum": "00000000"} for kind in ("steps", "epochs")}}
FOLDERS: dict[str, tuple[dict[str, object], State, str]] = {
    "done": (
        {"DONE": {}, "failure.json": FAILURE, "epochs.jsonl": '{"step": 1, "accuracy": 0.5}\n'},
        State.DONE,
        "accuracy 0.5",
    ),
    "failed": ({"failure.json": FAILURE}, State.FAILED, "rank 1 failed: killed by SIGKILL"),
    "reported": ({"errors/rank0.json": REPORT}, State.FAILED, "NonFiniteGradient: fc.weight is not finite"),
    "torn": ({"failure.json": '{"rank"'}, State.FAILED, ""),
    "stopped": (
        {"checkpoints/step-000000012/CHECKPOINT.json": SAVED, "checkpoints/step-000000009/CHECKPOINT.json": {}},
        State.STOPPED,
        "resumes from step 12",
    ),
    "killed": ({"checkpoints/.draft-step-000000012/rank0.pt": ""}, State.STOPPED, "no checkpoint: starts from step 0"),
    "damaged": (
        {"checkpoints/step-000000012/rank0.pt": "", "errors/rank0.json": REPORT},
        State.DAMAGED,
        "no checkpoint can be used: step-000000012: CHECKPOINT.json is damaged",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_tells_its_state(tmp_path: Path, name: str) -> None:
    files, state, words = FOLDERS[name]
    folder = make(tmp_path / name, files)
    assert (state_of(folder), describe(folder)) == (state, words)


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


def test_the_log_of_a_failure_is_the_file_that_tells_most(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", {"errors/rank0.json": REPORT, "ranks/run.log": ""})
    assert failure_log(folder) == folder.errors_path / "rank0.json"
    of_collective = {"errors/rank0.json": {**REPORT, "collective": True}, "errors/rank1.json": REPORT}
    assert failure_log(make(folder.path, of_collective)) == folder.errors_path / "rank1.json"
    make(folder.path, {"failure.json": {**FAILURE, "log": str(folder.path / "ranks/run.log")}})
    assert failure_log(folder) == folder.ranks_path / "run.log"
    assert failure_log(RunFolder(tmp_path / "nowhere")) is None


def text_of(table: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_plan_counts_what_is_done_what_goes_on_and_what_is_to_run(tmp_path: Path) -> None:
    output = f"output={tmp_path}"
    configs = composed(
        *[["sparsifier=micro", f"seed={seed}", output] for seed in range(4)], ["sparsifier=topk", output]
    )
    make(folder_of(configs[0]).path, {"DONE": {}})
    make(folder_of(configs[1]).path, FOLDERS["stopped"][0])
    make(folder_of(configs[2]).path, FOLDERS["failed"][0])
    lines = text_of(plan_table("study", configs)).splitlines()
    assert "study: 5 runs" in lines[0]
    (micro,) = [line.split() for line in lines if " micro " in line]
    assert [word for word in micro if word.isdecimal()] == ["2", "1", "1", "2"]  # workers, done, to resume, to run
    sums = [word for word in lines[-2].split() if word.isdecimal()]
    assert sums == ["1", "1", "3"]
    status = text_of(status_table(configs))
    assert "1 done, 1 failed, 1 stopped, 2 not started" in status
    assert "rank 1 failed: killed by SIGKILL" in status


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
        ("grid: {seed: [0]}", "must have the keys overrides and grid"),
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


def test_a_study_cannot_have_the_name_of_a_verb(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (conf / "clean.yaml").write_text("overrides: []\ngrid: {seed: [0]}")
    monkeypatch.setattr(sys, "argv", ["sweep", "status", "demo"])
    with pytest.raises(SystemExit) as caught:
        sweep.main()
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--jobs", "many"], "--jobs must be auto or a whole number of at least 1, got 'many'"),
        (["demo", "jobs=4"], "'jobs=4' is no setting of a run: use the option --jobs 4"),
        (["demo", "backend=slurm"], "'backend=slurm' is no setting of a run: use the option --backend slurm"),
        (["demo", "--jbos", "4"], "no such option: --jbos 4"),
        ([], "the following arguments are required: NAME, KEY=VALUE; see python -m experiments.sweep --help"),
        (["demo", "--jobs", "0"], "--jobs must be auto"),
        (["demo", "--backend", "pbs"], "--backend must be one of local, slurm, got 'pbs'"),
        (["demo", "sparsifier=mikro"], "did you mean 'micro'"),
        (["dmeo"], "did you mean 'demo'"),
        (["status", "dmeo"], "did you mean 'demo'"),
        (["rerun", "nothing"], "name the folder of a run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    with pytest.raises(SystemExit) as caught:
        sweep.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert line.startswith("error: ")
    assert message in line


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


@pytest.mark.parametrize(
    ("event", "code", "said"),
    [
        ("finished", 0, ["waiting for a run that another process holds", "done by another process"]),
        ("released", 0, ["waiting for a run that another process holds"]),
        ("Ctrl-C", 130, ["waiting for a run that another process holds"]),
    ],
)
def test_a_run_of_another_process_is_left_for_the_end_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, code: int, said: list[str]
) -> None:
    configs = composed(*[[f"seed={seed}", f"output={tmp_path}"] for seed in range(3)])
    folders = [folder_of(config) for config in configs]
    attempted: list[str] = []

    def attempt(config: TrainConfig, folder: RunFolder, watcher: object) -> None:
        with folder.claim():
            attempted.append(folder.path.name)
            make(folder.path, {"DONE": {}})

    def while_waiting(seconds: float) -> None:
        if event == "Ctrl-C":
            raise KeyboardInterrupt
        if event == "finished":
            make(folders[0].path, {"DONE": {}})
        other.close()

    monkeypatch.setattr(sequential_runs, "attempt", attempt)
    monkeypatch.setattr(held_runs, "_POLL_S", 0.0)
    monkeypatch.setattr(held_runs, "sleep", while_waiting)
    console = Console(file=io.StringIO(), width=500)
    with ExitStack() as other:
        other.enter_context(folders[0].locked())
        outcome = sequential_runs.run_one_by_one(configs, console, "continue")
    assert outcome.exit_code == code
    assert not outcome.failures
    assert outcome.num_left == (event == "Ctrl-C")
    assert outcome.num_elsewhere == (event == "finished")
    again = [folders[0].path.name] if event == "released" else []
    assert attempted == [folders[1].path.name, folders[2].path.name, *again]
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith(f"held: {folders[0].path.name}: in use by pid {os.getpid()} on ")
    assert [line.startswith(start) for line, start in zip(lines[1:], said, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(("event", "code"), [("finished", 0), ("Ctrl-C", 130)])
def test_several_at_once_wait_for_a_run_of_another_process_without_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, code: int
) -> None:
    (config,) = composed([f"output={tmp_path}"])
    folder = folder_of(config)
    console = Console(file=io.StringIO(), width=500)

    def draw(table: LiveTable) -> None:
        if event == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        else:
            make(folder.path, {"DONE": {}})

    monkeypatch.setattr(LiveTable, "draw", draw)
    monkeypatch.setattr(held_runs, "_POLL_S", 0.0)
    with folder.locked(), LiveTable(console, total=1, done=0, num_at_once=2) as table:
        outcome = ParallelSweep([config], table, at_once=2, on_error="continue").run()
        totals = table.totals()
    assert (outcome.exit_code, outcome.num_elsewhere) == (code, code == 0)
    assert ("1 done" in totals) == (code == 0)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.startswith(f"held: {folder.path.name}: in use by pid {os.getpid()} on ")
    assert said.count("waiting for") == 1


def test_clean_takes_what_failed_or_was_broken_off_and_never_what_runs(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, files) for name, (files, _, _) in FOLDERS.items()]
    chosen = removable(folders)
    assert {folder.path.name for folder in chosen} == set(FOLDERS) - {"done"}
    assert removable(folders, finished_too=True) == folders
    with chosen[0].claim():
        assert chosen[0] not in removable(folders)
        assert remove(chosen) == chosen[:1]
    assert {path.name for path in tmp_path.iterdir()} == {"done", chosen[0].path.name}


def clean(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["sweep", "clean", "demo", *words])
    with pytest.raises(SystemExit) as caught:
        sweep.main()
    return caught.value.code


def test_clean_asks_and_keeps_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"output={tmp_path}"
    monkeypatch.setattr(sweep, "jobs_of", lambda name, words: [[*WORDS, f"seed={seed}", *words] for seed in (0, 1)])
    done, failed = (folder_of(config).path for config in prepare_runs(sweep.jobs_of("demo", [output])))
    make(done, {"DONE": {}})
    make(failed, {"failure.json": FAILURE})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert clean([output], monkeypatch) == 2  # nobody is at the terminal
    assert failed.exists()
    assert "add --yes" in capsys.readouterr().err
    assert clean([output, "--yes"], monkeypatch) == 0
    assert done.exists()
    assert not failed.exists()
    assert clean([output, "--yes", "--all"], monkeypatch) == 0
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


def test_a_rerun_says_in_which_way_the_code_differs(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", {})
    assert "no git revision in the manifest" in code_differences(folder)[0]
    make(folder.path, {"manifest.json": {"git": {"revision": "0" * 40, "diff_sha256": None}}})
    (line,) = code_differences(folder)
    assert "git revision" in line


def test_a_sweep_counts_a_stop_a_failure_and_success() -> None:
    assert Outcome().exit_code == 0
    assert Outcome(num_left=1).exit_code == 1
    assert Outcome(num_left=1, stopped=143).exit_code == 143


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_the_live_table_shows_each_run_and_totals(
    tmp_path: Path, kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("experiments.sweeps.live_table._REDRAW_S", 0.0)
    monkeypatch.setattr("experiments.sweeps.live_table._LINES_EVERY_S", 0.0)
    console = Console(file=kind(), width=120)
    make(tmp_path / "one", {"steps.jsonl": '{"step": 2, "loss": 1.5}\n', "epochs.jsonl": '{"accuracy": 0.25}\n'})
    with LiveTable(console, total=5, done=1, num_at_once=2) as table:
        table.begin("one", tmp_path / "one", total_steps=9)
        table.begin("two", tmp_path / "two", total_steps=9)
        table.draw()
        table.failed("two", "out of [memory]")
        table.begin("three", tmp_path / "three", total_steps=9)
        table.stopped("three")
        table.done("one")
        assert table.totals().startswith("5 runs: 2 done, 1 failed, 2 waiting; all runs ")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("3/9", "1.5", "accuracy 0.25", "failed: two: out of [memory]", "stopped: three", "done: one"):
        assert words in shown
    assert ("\x1b" in shown) == (kind is Terminal)


def test_the_help_names_the_verbs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep", "--help"])
    with pytest.raises(SystemExit) as caught:
        sweep.main()
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"experiments.sweep {verb}" in shown for verb in ("status", "rerun", "clean"))
