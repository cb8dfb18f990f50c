"""What is missing never passes for whole: a table of damages to a run's folder, and what each command says to them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.config.keys import to_yaml
from experiments.runs.files import digest_of
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder
from tests.finished_runs import weights_of, write_study
from tests.in_process import Called, call
from tests.tools.simulated_runs import Run, configured, struck

WORDS = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=64", "batch_size=4", "epochs=4"]
CHECKPOINTS = ["checkpoint.every_steps=4", "checkpoint.keep=1"]
COMMON = ["cluster=simulated", "cluster.world_size=3", "density=0.05", *WORDS, *CHECKPOINTS]
NUM_STEPS, STOP = 20, 13  # five steps an epoch
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with one that was stopped before step 13, in its third epoch."""
    output = tmp_path_factory.mktemp("unfinished")
    config = configured(output, *WORDS, *CHECKPOINTS)
    Run(config, stop=STOP).folder.config_path.write_text(to_yaml(config))
    return output


@pytest.fixture(scope="module")
def finished(unfinished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with the same one, finished."""
    output = tmp_path_factory.mktemp("finished") / "runs"
    shutil.copytree(unfinished, output)
    assert train(output).code == 0
    return output


def copied(source: Path, tmp_path: Path) -> RunFolder:
    (run,) = shutil.copytree(source, tmp_path / "runs").iterdir()
    return RunFolder(run)


def train(output: Path, *words: str) -> Called:
    return call(["train", *COMMON, f"output={output}", *words])


def study(output: Path, *words: str) -> Called:
    """Call experiments.sweep for a study of this one run; STUDY in the words is replaced by its file."""
    path = write_study(output.parent, [*COMMON, f"output={output}"], {"seed": [0]})
    return call(["sweep", *(path if word == "STUDY" else word for word in words)])


def error_of(called: Called) -> str:
    """The only line that begins with error:, without a traceback."""
    assert called.code != 0
    assert "Traceback" not in called.err
    (line,) = [line for line in called.err.splitlines() if line.startswith("error:")]
    return line


def change_second_row(path: Path) -> None:
    """Change the last digit of a row, which leaves it JSON."""
    rows = path.read_text().splitlines(keepends=True)
    at = max(index for index, char in enumerate(rows[1]) if char.isdigit())
    rows[1] = rows[1][:at] + ("2" if rows[1][at] == "1" else "1") + rows[1][at + 1 :]
    path.write_text("".join(rows))


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def cut(number: int) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes()[:-number])


# What is done to a record
RECORDS: dict[str, Damage] = {"deleted": Path.unlink, "cut": cut(30), "changed": change_second_row}
# A file of a finished run, and what is done to it
FINISHED: dict[str, tuple[str, Damage]] = {
    **{f"steps {name}": ("steps.jsonl", damage) for name, damage in RECORDS.items()},
    "epochs deleted": ("epochs.jsonl", Path.unlink),
    "a row added": ("steps.jsonl", lambda path: path.open("ab").write(b'{"step": 20}\n')),
    "torn DONE": ("DONE", cut(30)),
    "changed DONE": ("DONE", lambda path: change_json(path, accuracy=1.0)),
    "torn configuration": ("config.yaml", cut(30)),
    "no configuration": ("config.yaml", Path.unlink),
    "no manifest": ("manifest.json", Path.unlink),
}


@pytest.mark.parametrize(("damage", "kind"), [*((damage, "steps") for damage in RECORDS), ("deleted", "epochs")])
def test_a_run_does_not_go_on_without_its_records(unfinished: Path, tmp_path: Path, damage: str, kind: str) -> None:
    folder = copied(unfinished, tmp_path)
    RECORDS[damage](folder.path / f"{kind}.jsonl")
    assert f"{kind}.jsonl" in error_of(train(tmp_path / "runs"))
    assert not folder.is_done()


@pytest.mark.parametrize("damage", FINISHED)
def test_every_command_calls_a_finished_run_damaged_and_changes_nothing(
    finished: Path, tmp_path: Path, damage: str
) -> None:
    folder, (name, spoil) = copied(finished, tmp_path), FINISHED[damage]
    output = folder.path.parent
    spoil(folder.path / name)
    figures = call(["figures", "--runs", str(output), "--out", str(tmp_path / "figures")])
    for called in (train(output), figures, call(["track", str(folder.path)])):
        assert name in error_of(called)
        assert "already done" not in called.out
    assert not (tmp_path / "figures").exists()
    (status,) = [line for line in study(output, "status", "STUDY").out.splitlines() if folder.path.name in line]
    assert status.startswith("damaged ")
    assert name in status
    assert "nothing to remove" in study(output, "clean", "STUDY", "--yes").out
    assert folder.is_done()


def test_damaged_runs_that_do_not_fit_the_selection_stop_no_figure(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    other = RunFolder(shutil.copytree(folder.path, tmp_path / "runs" / "other"))
    other.config_path.write_text(other.config_path.read_text().replace("\nseed: 0", "\nseed: 1"))
    words = ["figures", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "figures"), "--table"]
    assert "other is damaged: " in error_of(call(words))
    assert call([*words, "seed=0"]).code == 0


@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_what_was_recorded_after_the_checkpoint_may_be_anything(unfinished: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(unfinished, tmp_path)
    with (folder.path / f"{kind}.jsonl").open("ab") as file:
        file.write(b"hello\nwo")
    resumed = train(tmp_path / "runs", "resume=scratch")  # scratch is for damaged runs, and this one is not
    assert resumed.code == 0
    assert f"resumed from step {STOP}" in resumed.err
    assert [row["step"] for row in read_records(folder.steps_path)] == list(range(NUM_STEPS))


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Give rank 0's part of a checkpoint another content, with the right sums."""
    part, description = checkpoint / "rank0.pt", checkpoint / "CHECKPOINT.json"
    torch.save(change(torch.load(part, weights_only=True)), part)
    ranks = json.loads(description.read_text())["ranks"]
    change_json(description, ranks=[digest_of(part)._asdict(), *ranks[1:]])


CHECKPOINT: dict[str, tuple[Damage, str]] = {
    "a part": (lambda path: cut(10)(path / "rank1.pt"), "rank1.pt"),
    "the description": (lambda path: (path / "CHECKPOINT.json").unlink(), "CHECKPOINT.json"),
    "the model": (lambda path: rewrite(path, lambda content: {"own": content["own"]}), "not a checkpoint of a run"),
}


@pytest.mark.parametrize("damage", CHECKPOINT)
def test_a_run_without_a_whole_checkpoint_starts_anew_by_choice_alone(
    unfinished: Path, finished: Path, tmp_path: Path, damage: str
) -> None:
    folder, (spoil, said) = copied(unfinished, tmp_path), CHECKPOINT[damage]
    (checkpoint,) = folder.checkpoints_path.iterdir()
    spoil(checkpoint)
    line = error_of(train(tmp_path / "runs"))
    assert said in line
    assert "resume=scratch" in line
    assert len(read_records(folder.steps_path)) == STOP
    began = train(tmp_path / "runs", "resume=scratch")
    assert began.code == 0
    assert said in began.err
    assert weights_of(tmp_path / "runs") == weights_of(finished)
    assert [row["step"] for row in read_records(folder.steps_path)] == list(range(NUM_STEPS))
    (kept,) = folder.attempts_path.glob(f"*/checkpoints/{checkpoint.name}")
    assert len(read_records(kept.parents[1] / "steps.jsonl")) == STOP


def test_a_checkpoint_of_another_model_is_an_error_in_one_line(unfinished: Path, tmp_path: Path) -> None:
    folder = copied(unfinished, tmp_path)
    (checkpoint,) = folder.checkpoints_path.iterdir()
    other = {"model": {"other.weight": torch.ones(3)}}
    rewrite(checkpoint, lambda content: {**content, "shared": {**content["shared"], **other}})
    assert f"the checkpoint of step {STOP} of {folder.path} does not fit" in error_of(train(tmp_path / "runs"))


def test_a_sweep_reports_a_damaged_run_as_failed_and_takes_the_choice(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    folder.steps_path.unlink()
    failed = study(tmp_path / "runs", "STUDY", "--jobs", "1")
    assert failed.code == 1
    assert f"failed: {folder.path.name}: the run was finished, and is damaged: " in failed.out
    assert study(tmp_path / "runs", "STUDY", "--jobs", "1", "resume=scratch").code == 0
    assert len(read_records(folder.steps_path)) == NUM_STEPS


def replace_lock(path: Path) -> None:
    """As another job does that made the folder again."""
    path.rename(path.with_name("before"))
    path.touch()


LOST: dict[str, tuple[str, Damage, str]] = {
    "the folder": ("", shutil.rmtree, "was removed"),
    "the manifest": ("manifest.json", Path.unlink, "manifest.json"),
    "the steps": ("steps.jsonl", Path.unlink, "steps.jsonl"),
    "the ownership": (".lock", replace_lock, "was removed"),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_run_that_loses_its_folder_or_a_file_leaves_no_done(unfinished: Path, tmp_path: Path, lost: str) -> None:
    folder, (name, spoil, said) = copied(unfinished, tmp_path), LOST[lost]
    with struck(STOP + 4, lambda: spoil(folder.path / name)):
        assert said in error_of(train(tmp_path / "runs"))
    assert not folder.is_done()
