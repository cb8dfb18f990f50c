"""A run is of the files that it was trained on: a user's other files are another run, a published set's are refused."""

import json
import random
from pathlib import Path

import pytest

import data
from experiments import sweep
from experiments.config.keys import to_yaml
from experiments.reports import frames
from experiments.runs.run_folder import folder_of
from tests.dist.rank_functions import Ended, called, train
from tests.finished_runs import write_study
from tests.tools.simulated_runs import Run, configured

SMALL = ["model=gpt_small", "model.settings.hidden=16", "model.settings.num_layers=1", "model.settings.num_heads=1"]
SMALL += ["dataset.sequence_length=16", "batch_size=8", "epochs=1", "timed=false"]
SIMULATED = ["cluster=simulated", "cluster.world_size=2", "density=0.05"]


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two data roots: files of the same names and sizes, and of other content."""
    for name in ("one", "two"):
        draw = random.Random(name)
        folder = tmp_path / name / "wikitext-2"
        folder.mkdir(parents=True)
        for split in ("train", "valid"):
            (folder / f"{split}.txt").write_text("".join(draw.choices("abc \n", k=4000)))
    return tmp_path / "one", tmp_path / "two"


def assert_refused(ended: Ended, root: Path) -> None:
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(root) in line


def test_two_texts_of_a_user_are_two_runs(roots: tuple[Path, Path], tmp_path: Path) -> None:
    words = [*SMALL, *SIMULATED, "dataset=text", f"output={tmp_path / 'runs'}"]
    for done in ("done", "already done"):
        for root in roots:
            ended = train(*words, f"dataset.root={root}")
            assert ended.returncode == 0, ended.stderr
            assert ended.stdout.startswith(f"{done}: ")
    listed = called(sweep.main, write_study(tmp_path, words, {"dataset.root": [*map(str, roots)]}), "--list")
    assert sum(line.startswith("done ") for line in listed.stdout.splitlines()) == 2, listed.stderr
    assert frames.load(tmp_path / "runs").runs["variant"].nunique() == 2
    (roots[0] / "wikitext-2" / "train.txt").write_text("another text\n" * 300)
    assert train(*words, f"dataset.root={roots[0]}").stdout.startswith("done: ")


@pytest.mark.parametrize("manifest", ["manifest.json", "attempts/2/manifest.json"], ids=["begun", "broken off"])
def test_a_published_set_of_other_content_is_refused(manifest: str, roots: tuple[Path, Path], tmp_path: Path) -> None:
    words = [*SMALL, "dataset=wikitext2", f"dataset.root={roots[0]}"]
    path = folder_of(configured(tmp_path / "runs", *words, world_size=2)).path / manifest
    path.parent.mkdir(parents=True)
    before = json.dumps({"data_checksums": data.sums("wikitext2", str(roots[0]))})
    path.write_text(before)
    words += [*SIMULATED, f"output={tmp_path / 'runs'}"]
    other = f"dataset.root={roots[1]}"
    assert_refused(train(*words, other), roots[1])
    assert_refused(called(sweep.main, write_study(tmp_path, words, {}), other, "--backend", "slurm"), roots[1])
    assert path.read_text() == before
    assert train(*words).returncode == 0


def test_a_run_starts_from_another_of_the_same_data(roots: tuple[Path, Path], tmp_path: Path) -> None:
    words = [*SMALL, "dataset=wikitext2"]
    config = configured(tmp_path / "before", *words, f"dataset.root={roots[0]}", world_size=2)
    before = Run(config, stop=2).folder
    before.config_path.write_text(to_yaml(config))
    before.manifest_path.write_text(json.dumps({"data_checksums": data.sums("wikitext2", str(roots[0]))}))
    words += [*SIMULATED, f"output={tmp_path / 'runs'}", f"start_from={before.path}"]
    assert_refused(train(*words, f"dataset.root={roots[1]}"), roots[1])
    assert train(*words, f"dataset.root={roots[0]}").returncode == 0
