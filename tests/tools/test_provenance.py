"""Runs of other code, machines, torch or numbers of runs at once that stand side by side are marked, and refused."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import figures
from experiments.config import ROOT
from experiments.reports.provenance import differences, origin_of
from experiments.runs.manifest import code_of_attempts, git_state, other_code
from experiments.runs.run_folder import RunFolder
from tests.finished_runs import finished
from tests.refusals import refused
from tests.tools import study_folders

HERE: dict[str, Any] = {
    "git": {"revision": "a" * 40, "diff_sha256": None},
    "cpu": {"num_cores": 2, "model": "AMD EPYC"},
    "gpus": [],
    "versions": {"torch": "2.15.0"},
    "runs_at_once": 1,
}
OTHER = {"revision": "b" * 40, "diff_sha256": "1234567"}
CHANGES = {
    "code revisions: aaaaaaaa (2), bbbbbbbb with changes 123456 (1)": {"git": OTHER},
    "code revisions: aaaaaaaa (2), bbbbbbbb then aaaaaaaa (1)": {"earlier_git": [{"revision": "b" * 40}]},
    "machines: 2 cores of AMD EPYC (2), 2 cores of AMD EPYC, 1 H100 (1)": {"gpus": ["H100"]},
    "runs at once: 1 (2), 4 (1)": {"runs_at_once": 4},
    "runs at once: 1 (2), unknown (1)": {"runs_at_once": None},
}


@pytest.mark.parametrize("line", CHANGES)
def test_each_difference_has_a_line(line: str) -> None:
    manifests = {"a": HERE, "b": HERE, "c": HERE | CHANGES[line]}
    runs = pd.DataFrame([{"run": run, **origin_of(manifest)} for run, manifest in manifests.items()])
    assert differences(runs) == [f"different {line}"]
    assert differences(runs[:2]) == []


def write_run(root: Path, seed: int, manifest: dict[str, Any]) -> RunFolder:
    folder = study_folders.write_run(root, "topk", seed)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return finished(RunFolder(folder))


def test_unlike_runs_are_marked_and_with_strict_refused(tmp_path: Path) -> None:
    root, out = tmp_path / "runs", tmp_path / "figures"
    write_run(root, 0, HERE)
    command = ["--runs", str(root), "--out", str(out), "--table"]
    assert figures.main([*command, "--strict"]) == 0
    write_run(root, 1, HERE | {"runs_at_once": 2})
    line = "different runs at once: 1 (1), 2 (1)"
    assert figures.main(command) == 0
    assert line in (out / "summary.md").read_text()
    refused(["figures", *command, "--strict"], "ResNet-18 on CIFAR-10, 8 workers", line)


def test_finished_runs_of_other_code_are_reported(tmp_path: Path) -> None:
    own, other = write_run(tmp_path, 0, {"git": git_state(ROOT)}), write_run(tmp_path, 1, {"git": OTHER})
    assert other_code([own, write_run(tmp_path, 2, {})]) == ""
    assert other_code([own, other]).startswith("1 of 2 finished runs are of other code: bbbbbbbb with changes 123456")


def test_a_manifest_names_the_code_of_earlier_attempts(tmp_path: Path) -> None:
    assert code_of_attempts(RunFolder(tmp_path)) == []
    for number, (began, name) in enumerate([(0, "a"), (5, "b"), (0, "c"), (7, "d")], start=1):
        folder = tmp_path / "attempts" / str(number)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"began_at_step": began, "git": {"revision": name}}))
    (tmp_path / "attempts" / "10").mkdir()  # rows alone
    assert [git["revision"] for git in code_of_attempts(RunFolder(tmp_path))] == ["c", "d"]
