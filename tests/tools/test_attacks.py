"""Files and names from strangers: nothing that is read runs code, and no name leaves its quotes."""

import html
import os
import pickle
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.text import Text
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.config import ROOT
from experiments.config.compose import compose_runs
from experiments.config.errors import UserError
from experiments.config.keys import to_yaml
from experiments.config.networks import load_network
from experiments.reports.figure_parts import head, new_figure
from experiments.reports.frames import load
from experiments.reports.plot_style import plain
from experiments.runs.checkpoints import Checkpoint
from experiments.runs.files import digest_of
from experiments.runs.rank_files import read_rank
from experiments.runs.run_folder import RunFolder
from experiments.sweeps.job_script import arrays_of, script
from experiments.sweeps.rerun import saved_config
from experiments.sweeps.study import jobs_of
from experiments.tools.reproduce.html_page import escaped, fenced, write_html
from experiments.tools.shared.markdown import table
from micro.checkpoints.rank_states import state_of
from tests.refusals import refused

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


def read_checkpoint(path: Path) -> None:
    path = path.rename(path.with_name("rank0.pt"))
    read_rank(Checkpoint(path=path.parent, step=0, epoch=0, ranks=[digest_of(path)], records={}), 0)


@pytest.mark.parametrize("read", [read_checkpoint, lambda path: state_of(path.read_bytes())])
@pytest.mark.parametrize("save", [torch.save, lambda held, path: path.write_bytes(pickle.dumps(held))])
def test_a_pickle_that_is_read_runs_no_code(
    tmp_path: Path, read: Callable[[Path], object], save: Callable[[Any, Path], object]
) -> None:
    marker, path = tmp_path / "ran", tmp_path / "file"
    save({"model": Evil(marker), "weights": torch.ones(3)}, path)
    with pytest.raises((UserError, ValueError, pickle.UnpicklingError)):
        read(path)
    assert not marker.exists()


YAML_READERS: dict[str, Callable[[Path], object]] = {
    "study": lambda path: jobs_of(str(path), []),
    "run": lambda path: saved_config(RunFolder(path.parent), []),
    "network": load_network,
    "figures": lambda path: load(path.parent.parent),
}


@pytest.mark.parametrize("reader", YAML_READERS)
def test_yaml_that_is_read_runs_no_code(tmp_path: Path, reader: str) -> None:
    folder, marker = tmp_path / "run", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"model: !!python/object/apply:os.mkdir ['{marker}']\n")
    (folder / "DONE").write_text('{"step": 1, "epoch": 0}')
    refused(lambda: YAML_READERS[reader](folder / "config.yaml"), "", error=UserError)
    assert not marker.exists()


def test_a_run_folder_from_elsewhere_asks_for_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    (config,) = compose_runs([[*TINY, f"output={tmp_path}"]])
    text = to_yaml(config).replace(f"output: {tmp_path}", "output: ${oc.env:SECRET}")
    assert "SECRET" in text
    (tmp_path / "config.yaml").write_text(text)
    line = refused(lambda: saved_config(RunFolder(tmp_path), []), "config.yaml: it holds ${...}", error=UserError)
    assert "hunter2" not in line


# Names


@pytest.mark.parametrize("name", NAMES)
def test_a_job_script_runs_no_name(tmp_path: Path, name: str) -> None:
    srun, output = tmp_path / "bin/srun", tmp_path / "out" / name.replace("\n", "")
    srun.parent.mkdir()
    srun.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/words\n")  # its words, a line each
    srun.chmod(0o755)
    words = [*TINY, f"+note={name}".replace("\n", " "), f"output={output}"]
    (config,) = compose_runs([[*TINY]])
    (array,) = arrays_of(name, [words], [replace(config, output=str(output))])
    array.folder.mkdir(parents=True)
    (array.folder / "runs.txt").write_text(array.rows)
    made = script(array, [1], python="python", working=tmp_path)
    variables = {"PATH": f"{srun.parent}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", made], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "words").read_text().splitlines()[-len(words) :] == words
    assert not (tmp_path / "ran").exists()
    assert all(line.startswith("#SBATCH --") for line in made.splitlines() if line.startswith("#SBATCH"))


@pytest.mark.parametrize("where", ["words", "output", "working"])
def test_a_line_break_is_refused_by_a_job_script(tmp_path: Path, where: str) -> None:
    given = {"words": "seed=1", "output": str(tmp_path), "working": str(tmp_path)} | {where: "a\nmkdir ran\n"}
    (config,) = compose_runs([[*TINY]])

    def work() -> None:
        (array,) = arrays_of("study", [[given["words"]]], [replace(config, output=given["output"])])
        script(array, [1], working=Path(given["working"]))

    refused(work, "without line breaks", r"a\nmkdir ran\n", error=UserError)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_a_name_as_it_is(tmp_path: Path, name: str) -> None:
    blocks = [f"# {escaped(name)}", escaped(name), fenced(name), table(["a"], [[escaped(name)]])]
    page = write_html("\n\n".join(blocks), name, tmp_path / "page.html").read_text()
    assert "<script" not in page
    texts = [" ".join(html.unescape(text).split()) for text in re.split("<[^>]*>", page)]
    assert texts.count(" ".join(name.split())) >= 4


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


def locked(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", ["uv", "demo", "test"])
def test_every_pinned_package_has_checksums_and_no_address(name: str) -> None:
    entries = re.split(r"\n(?=[a-zA-Z])", locked(name))[1:]
    assert entries
    assert [entry.split()[0] for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    assert not re.search("https?://|index-url|file:", locked(name))


@pytest.mark.skipif(f"\ntorch=={version('torch')} " not in locked("test"), reason="torch is not the one of the lock")
def test_the_lock_names_the_extras_that_its_packages_ask_for() -> None:
    """Where the lock has `name` alone, pip 23.2 takes the newest `name[extra]` and refuses it: it has no checksum."""
    extras = dict(re.findall(r"(?m)^([\w.-]+)(\[[^]]*\])?==", locked("test")))
    missing = []
    for name in extras:
        with suppress(PackageNotFoundError):  # of another platform
            for need in map(Requirement, requires(name) or []):
                named = set(extras.get(canonicalize_name(need.name), "").strip("[]").split(", "))
                if need.extras - named and (need.marker is None or need.marker.evaluate({"extra": ""})):
                    missing.append(f"{name} asks for {need}")
    assert missing == []
