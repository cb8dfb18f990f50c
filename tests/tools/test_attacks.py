"""Files and names from strangers: nothing that is read runs code, and no name leaves its quotes."""

import io
import os
import pickle
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from data import imagenet
from experiments.config.compose import compose_runs
from experiments.config.errors import UserError
from experiments.config.paths import ROOT
from experiments.config.schema import to_yaml
from experiments.reports.figure_parts import head, new_figure
from experiments.reports.html_page import escaped, fenced, write_html
from experiments.reports.markdown import table
from experiments.reports.plot_style import plain
from experiments.runs.atomic_files import digest_of
from experiments.runs.checkpoints import Checkpoint
from experiments.runs.run_folder import RunFolder
from experiments.runs.saved_state import read_rank
from experiments.studies.simulated_steps.networks import load_network
from experiments.sweeps.job_script import arrays_of, script
from experiments.sweeps.rerun import saved_config
from experiments.sweeps.study import jobs_of
from experiments.tracking.sources import read
from micro.checkpoints.rank_states import state_of

TINY = ["model=mlp", "dataset=synthetic", "cluster=simulated", "cluster.world_size=2"]
NAMES = [
    "$(mkdir ran)",
    "`mkdir ran`",
    "a'b\"c",
    "a;mkdir ran",
    "a\nmkdir ran",
    "-e mkdir",
    "a b",
    "[/red] [bold",
    "$x^{",
    "<script>",
]


class Evil:
    """What pickle rebuilds by making a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def evil_tensors(marker: Path) -> bytes:
    """What torch.save writes of a state with such an object in it."""
    file = io.BytesIO()
    torch.save({"model": Evil(marker), "weights": torch.ones(3)}, file)
    return file.getvalue()


def read_checkpoint(folder: Path, content: bytes) -> None:
    (folder / "rank0.pt").write_bytes(content)
    read_rank(Checkpoint(path=folder, step=0, ranks=[digest_of(folder / "rank0.pt")], records={}), 0)


def read_npy(folder: Path, content: bytes) -> None:
    np.save(folder / "train_images.npy", np.array([pickle.loads, content], dtype=object), allow_pickle=True)
    imagenet._array(folder / "train_images.npy")


READERS: dict[str, Callable[[Path, bytes], object]] = {
    "checkpoint": read_checkpoint,
    "state of a rank": lambda folder, content: state_of(content),
    "array": read_npy,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("pack", [evil_tensors, lambda marker: pickle.dumps(Evil(marker))], ids=["torch", "pickle"])
def test_a_pickle_that_is_read_runs_no_code(tmp_path: Path, reader: str, pack: Callable[[Path], bytes]) -> None:
    marker = tmp_path / "ran"
    with pytest.raises((UserError, ValueError, pickle.UnpicklingError)):
        READERS[reader](tmp_path, pack(marker))
    assert not marker.exists()


YAML_READERS: dict[str, Callable[[Path], object]] = {
    "study": lambda path: jobs_of(str(path), []),
    "run": lambda path: saved_config(RunFolder(path.parent), []),
    "network": load_network,
    "figures": lambda path: read([str(path.parent.parent)]),
}


@pytest.mark.parametrize("reader", YAML_READERS)
@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir ['{}']", "!!python/object/new:os.mkdir ['{}']"])
def test_yaml_that_is_read_runs_no_code(tmp_path: Path, reader: str, tag: str) -> None:
    folder, marker = tmp_path / "run", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"model: {tag.format(marker)}\n")
    (folder / "DONE").write_text('{"step": 1, "epoch": 0}')
    with pytest.raises(UserError) as caught:
        YAML_READERS[reader](folder / "config.yaml")
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_a_run_folder_from_elsewhere_asks_for_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    (config,) = compose_runs([[*TINY, f"output={tmp_path}"]])
    text = to_yaml(config).replace(f"output: {tmp_path}", "output: ${oc.env:SECRET}")
    assert "SECRET" in text
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config.yaml: it holds \$\{...\}, which no run writes") as caught:
        saved_config(RunFolder(tmp_path), [])
    assert "hunter2" not in str(caught.value)


# Names


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """An environment whose srun writes its words into a file, a line each."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin/srun"
    srun.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/words\n")
    srun.chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize("name", NAMES)
def test_a_job_script_runs_no_name(tmp_path: Path, stubs: dict[str, str], name: str) -> None:
    output = tmp_path / "out" / name.replace("\n", "")
    words = [*TINY, f"+note={name}".replace("\n", " "), f"output={output}"]
    (config,) = compose_runs([[*TINY]])
    config = replace(config, output=str(output))
    (array,) = arrays_of(name, [words], [config])
    assert re.fullmatch(r"[\w.-]+", array.study)
    array.folder.mkdir(parents=True)
    (array.folder / "runs.txt").write_text(array.rows)
    made = script(array, [1], python="python", working=tmp_path)
    done = subprocess.run(["bash", "-c", made], env=stubs, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "words").read_text().splitlines()[-len(words) :] == words
    assert not (tmp_path / "ran").exists()
    assert all(line.startswith("#SBATCH --") for line in made.splitlines() if line.startswith("#SBATCH"))


@pytest.mark.parametrize("where", ["words", "output", "working"])
def test_a_line_break_is_refused_by_a_job_script(tmp_path: Path, where: str) -> None:
    evil = "a\nmkdir ran\n"
    (config,) = compose_runs([[*TINY]])
    config = replace(config, output=evil if where == "output" else str(tmp_path))

    def work() -> None:
        (array,) = arrays_of("study", [[evil] if where == "words" else []], [config])
        script(array, [1], working=Path(evil) if where == "working" else tmp_path)

    with pytest.raises(UserError, match=r"without line breaks, got 'a\\nmkdir ran\\n'"):
        work()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_a_name_as_it_is(tmp_path: Path, name: str) -> None:
    blocks = [f"# {escaped(name)}", escaped(name), fenced(name), table(["a"], [[escaped(name)]])]
    page = write_html("\n\n".join(blocks), name, tmp_path / "page.html").read_text()
    found = _Texts()
    found.feed(page)
    assert "script" not in found.tags
    assert sum(" ".join(name.split()) == " ".join(text.split()) for text in found.texts) >= 4


class _Texts(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", ["$x^{$", "$$", "a$b", r"\$x^{$"])
def test_a_figure_shows_a_name_as_it_is(tmp_path: Path, name: str) -> None:
    figure = new_figure(3, 2)
    axes = figure.subplots()
    head(figure, name, [*axes.plot([1, 2], label=name)])
    axes.set_title(plain(name))
    figure.savefig(tmp_path / "figure.png")  # raises where a formula is read and is none
    texts = [text._preprocess_math(text.get_text()) for text in figure.findobj(Text) if "$" in text.get_text()]
    assert len(texts) >= 3
    assert set(texts) == {(name.replace("\\", ""), False)}


# Packages


@pytest.mark.parametrize("name", ["uv", "demo", "test"])
def test_every_pinned_package_has_checksums_and_every_beta_is_explained(name: str) -> None:
    lock, declared = (ROOT / "requirements" / f"{name}.txt").read_text(), (ROOT / "pyproject.toml").read_text()
    entries = re.split(r"\n(?=[a-zA-Z])", lock)[1:]
    assert entries
    assert [entry.split()[0] for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    assert [word for word in ("http://", "https://", "index-url", "file:") if word in lock] == []
    betas = [entry.split("==")[0] for entry in entries if re.match(r"[\w.-]+==[\d.]+(a|b|rc)\d", entry)]
    assert [name for name in betas if name.split("-")[0] not in declared.lower()] == []


def test_the_demo_installs_few_packages_and_the_versions_of_the_tests() -> None:
    """What the tests need alone is no weight for who wants to see the demo."""
    demo, everything = (
        dict(re.findall(r"(?m)^([\w.-]+?)(?:\[[^]]*\])?==(\S+)", (ROOT / "requirements" / f"{name}.txt").read_text()))
        for name in ("demo", "test")
    )
    assert demo.items() <= everything.items()
    assert not {"lightning", "transformers", "mkdocs", "ipykernel", "twine", "wandb", "pytest"} & demo.keys()


def test_the_lock_names_the_extras_that_its_packages_ask_for() -> None:
    """Where the lock has `name` alone, pip 23.2 takes the newest `name[extra]` and refuses it: it has no checksum."""
    locked = dict(re.findall(r"(?m)^([\w.-]+)(\[[^]]*\])?==", (ROOT / "requirements" / "test.txt").read_text()))
    missing = []
    for name in locked:
        try:
            needs = map(Requirement, requires(name) or [])
        except PackageNotFoundError:  # of another platform
            continue
        for need in needs:
            named = set(locked.get(canonicalize_name(need.name), "").strip("[]").split(", "))
            if need.extras - named and (need.marker is None or need.marker.evaluate({"extra": ""})):
                missing.append(f"{name} asks for {need}")
    assert missing == []
