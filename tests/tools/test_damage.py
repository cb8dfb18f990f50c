"""What is missing never passes for whole: a table of damages to a run's folder, and what each command says to them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.config.errors import UserError
from experiments.config.schema import to_yaml
from experiments.runs.atomic_files import digest_of
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder
from experiments.training.loop import Trainer
from tests.in_process import Called, call
from tests.tools.simulated_runs import Run, configured

WORDS = ["model=mlp", "dataset=synthetic", "dataset.settings.num_samples=64", "batch_size=4", "epochs=4"]
CHECKPOINTS = ["checkpoint.every_steps=4", "checkpoint.keep=1"]
NUM_STEPS, STOP = 20, 13  # five steps an epoch
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with one that was stopped before step 13, in its third epoch."""
    output = tmp_path_factory.mktemp("unfinished")
    config = configured(output, *WORDS, *CHECKPOINTS)
    run = Run(config, stop=STOP)
    run.folder.config_path.write_text(to_yaml(config))
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
    common = ["cluster=simulated", "cluster.world_size=3", "density=0.05", f"output={output}"]
    return call(["train", *common, *WORDS, *CHECKPOINTS, *words])


def error_of(called: Called) -> str:
    """The only line that begins with error:, without a traceback."""
    assert "Traceback" not in called.err
    lines = [line for line in called.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, called.err
    return lines[0]


def lines_of(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def flip(line: bytes) -> bytes:
    """Change the last digit, which leaves the line JSON."""
    at = max(index for index, char in enumerate(line) if chr(char).isdigit())
    return line[:at] + (b"1" if line[at : at + 1] != b"1" else b"2") + line[at + 1 :]


# What is done to a file of records, and what is said of it
DAMAGES: dict[str, tuple[Damage, str]] = {
    "deleted": (Path.unlink, "is missing"),
    "emptied": (lambda path: path.write_bytes(b""), "are gone"),
    "cut in a row": (lambda path: path.write_bytes(path.read_bytes()[:-30]), "are gone"),
    "cut behind a row": (lambda path: lines_of(path, lambda rows: rows[:-1]), "are gone"),
    "first row removed": (lambda path: lines_of(path, lambda rows: rows[1:]), "are gone"),
    "changed": (lambda path: lines_of(path, lambda rows: [rows[0], flip(rows[1]), *rows[2:]]), "was changed"),
    "repeated": (lambda path: lines_of(path, lambda rows: [rows[0], *rows]), "was changed"),
}
DAMAGED_RECORDS = [*((damage, "steps") for damage in DAMAGES), ("deleted", "epochs"), ("cut in a row", "epochs")]


def spoilt(folder: RunFolder, damage: str, kind: str) -> str:
    """Damage a record; return what is said of it."""
    DAMAGES[damage][0](folder.path / f"{kind}.jsonl")
    return f"{kind}.jsonl .*{DAMAGES[damage][1]}"


@pytest.mark.parametrize(("damage", "kind"), DAMAGED_RECORDS)
def test_a_run_does_not_go_on_without_its_records(unfinished: Path, tmp_path: Path, damage: str, kind: str) -> None:
    folder = copied(unfinished, tmp_path)
    said = spoilt(folder, damage, kind)
    called = train(tmp_path / "runs")
    assert called.code in (1, 2)
    assert_matches(said, error_of(called))
    assert not folder.is_done()


@pytest.mark.parametrize(("damage", "kind"), DAMAGED_RECORDS)
def test_a_finished_run_without_its_records_is_damaged_for_every_command(
    finished: Path, tmp_path: Path, damage: str, kind: str
) -> None:
    folder = copied(finished, tmp_path)
    assert_damaged(folder, spoilt(folder, damage, kind))


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


OTHER_FILES: dict[str, tuple[Damage, str]] = {
    "torn DONE": (lambda path: (path / "DONE").write_bytes((path / "DONE").read_bytes()[:40]), "DONE is not whole"),
    "changed DONE": (lambda path: change_json(path / "DONE", accuracy=1.0), "DONE was changed after it was written"),
    "torn configuration": (
        lambda path: (path / "config.yaml").write_bytes((path / "config.yaml").read_bytes()[:45] + b"{"),
        "config.yaml was changed after the run",
    ),
    "a row added": (lambda path: (path / "steps.jsonl").open("ab").write(b'{"step": 20}\n'), "lines were added"),
    "no configuration": (lambda path: (path / "config.yaml").unlink(), "config.yaml is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
}


@pytest.mark.parametrize("damage", OTHER_FILES)
def test_a_finished_run_without_its_other_files_is_damaged_for_every_command(
    finished: Path, tmp_path: Path, damage: str
) -> None:
    folder = copied(finished, tmp_path)
    spoil, said = OTHER_FILES[damage]
    spoil(folder.path)
    assert_damaged(folder, said, is_tracked="config" not in damage and "manifest" not in damage)


def assert_damaged(folder: RunFolder, said: str, *, is_tracked: bool = True) -> None:
    """Every command calls a finished run damaged, says why in one line, and changes nothing."""
    output = folder.path.parent
    trained = train(output)
    assert trained.code != 0
    assert "already done" not in trained.out
    assert_matches(said, error_of(trained))
    drawn = draw(output.parent)
    assert drawn.code == 2
    assert_matches(said, error_of(drawn))
    assert not (output.parent / "figures").exists()
    tracked = call(["track", str(folder.path)])
    assert tracked.code == 2
    assert_matches(said if is_tracked else "has no|is damaged", error_of(tracked))
    (status,) = [line for line in study("status", output).out.splitlines() if folder.path.name in line]
    assert status.startswith("damaged ")
    assert_matches(said, status)
    assert "nothing to remove" in study("clean", output, "--yes").out
    assert folder.is_done()


def draw(place: Path, *words: str) -> Called:
    return call(["figures", "--runs", str(place / "runs"), "--out", str(place / "figures"), *words])


def study(verb: str, output: Path, *words: str) -> Called:
    """Call a verb of experiments.sweep for a study of the run alone."""
    path = output.parent / "study.yaml"
    common = ["cluster=simulated", "cluster.world_size=3", "density=0.05", f"output={output}"]
    path.write_text(json.dumps({"overrides": [*common, *WORDS, *CHECKPOINTS], "grid": {"seed": [0]}}))
    return call(["sweep", verb, str(path), *words])


def test_a_damaged_run_that_does_not_fit_the_selection_stops_no_figure(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    other = shutil.copytree(folder.path, tmp_path / "runs" / "other")
    config = (other / "config.yaml").read_text().replace("\nseed: 0", "\nseed: 1")
    (other / "config.yaml").write_text(config)
    assert_matches("other is damaged: .*config.yaml was changed", error_of(draw(tmp_path, "--table")))
    assert draw(tmp_path, "--table", "seed=0").code == 0


@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_what_was_recorded_after_the_checkpoint_may_be_anything(unfinished: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(unfinished, tmp_path)
    with (folder.path / f"{kind}.jsonl").open("ab") as file:
        file.write(b"hello\nwo")
    assert train(tmp_path / "runs").code == 0
    assert [row["step"] for row in read_records(folder.steps_path)] == list(range(NUM_STEPS))


def test_an_older_checkpoint_is_taken_where_only_later_rows_are_damaged(unfinished: Path, tmp_path: Path) -> None:
    config = configured(tmp_path / "runs", *WORDS, "checkpoint.every_steps=4")
    whole = Run(configured(tmp_path / "whole", *WORDS))
    stopped = Run(config, stop=STOP)
    lines_of(stopped.folder.steps_path, lambda rows: rows[:-1])
    end = Run(config)
    assert end.began_at == 12
    assert "steps.jsonl" in end.trainer.unused_checkpoints[0]
    assert end.digest == whole.digest


def assert_matches(pattern: str, line: str) -> None:
    assert re.search(pattern, line), line


def break_checkpoint(folder: RunFolder) -> str:
    """Flip a byte in the only checkpoint; return what is said of it."""
    (part,) = folder.checkpoints_path.glob("*/rank1.pt")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    return "rank1.pt: not the bytes that were written"


def remove_description(folder: RunFolder) -> str:
    (path,) = folder.checkpoints_path.glob("*/CHECKPOINT.json")
    path.unlink()
    return "CHECKPOINT.json: no such file or directory"


def rewritten(folder: RunFolder, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Give rank 0's part of the only checkpoint another content, with the right sums."""
    (description,) = folder.checkpoints_path.glob("*/CHECKPOINT.json")
    part = description.parent / "rank0.pt"
    torch.save(change(torch.load(part, weights_only=True)), part)
    held = json.loads(description.read_text())
    held["ranks"][0] = digest_of(part)._asdict()
    description.write_text(json.dumps(held))


def remove_model(folder: RunFolder) -> str:
    rewritten(folder, lambda content: {**content, "shared": {"position": {}}})
    return "rank0.pt: it is no part of a run's checkpoint: model, num_steps, optimizer missing"


SPOILS = [break_checkpoint, remove_description, remove_model]


def test_a_checkpoint_with_the_state_of_another_model_is_one_line(unfinished: Path, tmp_path: Path) -> None:
    folder = copied(unfinished, tmp_path)
    other = {"model": {"other.weight": torch.ones(3)}}
    rewritten(folder, lambda content: {**content, "shared": {**content["shared"], **other}})
    refused = train(tmp_path / "runs")
    assert refused.code == 1
    line = error_of(refused)
    assert f"the checkpoint of step {STOP} of {folder.path} does not fit this run: Error(s) in loading" in line
    assert not folder.is_done()


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_run_without_a_whole_checkpoint_starts_anew_by_choice_alone(
    unfinished: Path, finished: Path, tmp_path: Path, spoil: Callable[[RunFolder], str]
) -> None:
    folder = copied(unfinished, tmp_path)
    said = spoil(folder)
    refused = train(tmp_path / "runs")
    assert refused.code == 1
    assert_matches(f"{said}.* add resume=scratch to start again", error_of(refused))
    (rows, *_) = [len(read_records(folder.steps_path))]
    assert rows == STOP
    swept = study("status", tmp_path / "runs")
    assert any(state in swept.out for state in ("damaged ", "failed "))
    began = train(tmp_path / "runs", "resume=scratch")
    assert began.code == 0
    assert_matches(f"checkpoint not used: .*{said}", began.err)
    assert weights(folder) == weights(copied(finished, tmp_path / "other"))
    assert [row["step"] for row in read_records(folder.steps_path)] == list(range(NUM_STEPS))
    assert sum(path.name == f"step-{STOP:09d}" for path in folder.attempts_path.glob("*/checkpoints/*")) == 1
    assert sum(len(read_records(path)) for path in folder.attempts_path.glob("*/steps.jsonl")) == STOP


def weights(folder: RunFolder) -> str:
    return str(json.loads(folder.done_path.read_text())["weights_sha256"])


def test_a_whole_run_resumes_whatever_resume_says(unfinished: Path, tmp_path: Path) -> None:
    copied(unfinished, tmp_path)
    called = train(tmp_path / "runs", "resume=scratch")
    assert called.code == 0
    assert f"resumed from step {STOP}" in called.err
    assert "resume=scratch is for damaged runs" in called.err


def test_a_sweep_reports_a_damaged_run_as_failed_and_takes_the_choice(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    folder.steps_path.unlink()
    path = tmp_path / "study.yaml"
    study("status", tmp_path / "runs")  # writes the study
    words = ["sweep", str(path), "--jobs", "1"]
    failed = call(words)
    assert failed.code == 1
    assert f"failed: {folder.path.name}: the run was finished, and is damaged: " in failed.err
    assert call([*words, "resume=scratch"]).code == 0
    assert folder.is_done()
    assert len(read_records(folder.steps_path)) == NUM_STEPS


def test_a_file_that_vanishes_while_the_run_goes_on_leaves_no_done(unfinished: Path, tmp_path: Path) -> None:
    config = configured(tmp_path / "runs", *WORDS, *CHECKPOINTS)
    folder = copied(unfinished, tmp_path)
    with pytest.raises(UserError, match=r"manifest\.json was removed while the run went on"):
        Run(config, at={STOP + 2: lambda: folder.manifest_path.unlink()})
    assert list(folder.checkpoints_path.iterdir())
    assert not folder.is_done()


REMOVED: dict[str, tuple[Damage, str]] = {
    "all": (shutil.rmtree, r"run folder .* was removed: this process stops and writes nothing more there"),
    "steps": (lambda path: (path / "steps.jsonl").unlink(), r"steps\.jsonl was removed while the run went on"),
    "epochs": (lambda path: (path / "epochs.jsonl").unlink(), r"epochs\.jsonl was removed while the run went on"),
}


@pytest.mark.parametrize(("what", "step"), [("all", STOP + 2), ("steps", NUM_STEPS - 1), ("epochs", STOP + 2)])
def test_a_run_whose_folder_is_removed_stops_and_leaves_no_done(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, step: int
) -> None:
    folder = copied(unfinished, tmp_path)
    remove, said = REMOVED[what]
    take = Trainer.step

    def watched(trainer: Trainer, epoch: int, index: int) -> float:
        if trainer.position.step == step:
            remove(folder.path)
        return take(trainer, epoch, index)

    monkeypatch.setattr(Trainer, "step", watched)
    called = train(tmp_path / "runs")
    assert called.code == 1
    assert_matches(said, error_of(called))
    assert called.err.count("\n") <= 3
    assert not folder.is_done()
    assert "done" not in called.out
    monkeypatch.undo()
    assert "already done" not in train(tmp_path / "runs", "resume=scratch").out
