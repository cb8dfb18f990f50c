"""Whatever is in a file that comes from elsewhere, it is read or refused: drawn by hypothesis.

The files are those of a run, a study, a network and profiles, with some of their content replaced. MICRO_FUZZ=20000
draws that many others.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from experiments.config.compose import compose_runs
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError
from experiments.config.paths import CONF
from experiments.reports.frames import load
from experiments.runs.checkpoints import open_checkpoint
from experiments.runs.git_state import other_code
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import failure_log, failure_reason, last_step, saved_step, state_of
from experiments.studies.simulated_steps.networks import load_network
from experiments.sweeps.listing import describe
from experiments.sweeps.rerun import saved_config
from experiments.sweeps.study import jobs_of
from experiments.training.preflight import check_runs
from experiments.training.runner import execute
from micro.planning.documents import BadFile
from micro.planning.schedules.base import Plan
from micro.planning.tables import Curve, LinkTable, SelectTable
from micro.planning.traces import Layer, Trace
from tests.drawn import ANYTHING
from tests.tools.simulated_runs import IMAGES, configured

NUMBER = int(os.environ.get("MICRO_FUZZ", "0"))
TINY = ["model=mlp", "model.settings.hidden=4", "dataset=synthetic", "cluster.nproc_per_node=2", "schedule=mgwfbp"]
LAYERS = (5, 160, 40), (3, 64, 16), (1, 1024, 16)  # of this model: its number, bytes of its weight, of its bias


def write_profiles(folder: Path) -> None:
    sizes = {
        f"layers.{k}.{name}": size for k, *two in LAYERS for name, size in zip(("weight", "bias"), two, strict=True)
    }
    layers = tuple(Layer(name, size, 0.001 * place, 0.001) for place, (name, size) in enumerate(sizes.items()))
    Trace(model="mlp", layers=layers, forward_s=0.01, backward_s=0.01).save(folder / "trace.json")
    curve = Curve(sizes=(0.0, 1e6), seconds=(1e-4, 1e-2))
    operations = ("all_reduce", "gather_rows", "gather_lists")
    LinkTable(world_size=2, collectives=dict.fromkeys(operations, curve)).save(folder / "link.json")
    SelectTable(world_size=2, density=0.01, methods={"micro": curve}).save(folder / "select.json")
    Plan(schedule="mgwfbp", groups=(("a", "b"), ("c",)), num_bytes=(8, 4)).save(folder / "plan.json")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of whole files of every kind."""
    set_hypothesis_home_dir(tmp_path_factory.mktemp("hypothesis"))
    folder = tmp_path_factory.mktemp("files")
    write_profiles(folder)
    finished = configured(folder / "runs", *IMAGES)
    execute(finished)
    run = folder_of(finished).path
    run.rename(folder / "runs/run")
    (folder / "runs/run/failure.json").write_text('{"rank": 1, "message": "no", "log": "x"}')
    (folder / "runs/run/.owner.json").write_text(
        json.dumps({"token": "0", "host": "here", "pid": 1, "job": "", "since": "now"})
    )
    checkpoint = folder / "runs/run/checkpoints/step-00000006"
    checkpoint.mkdir(parents=True)
    digest = {"bytes": 5, "sha256": "0" * 64}
    held = {"step": 6, "ranks": [digest] * 3, "records": {"steps.jsonl": digest}}
    (checkpoint / "CHECKPOINT.json").write_text(json.dumps(held))
    (folder / "study.yaml").write_text(
        "overrides: [epochs=2]\ngrid: {seed: [0, 1], sparsifier: [topk, [sparsifier=micro, lr=1]]}\n"
    )
    (folder / "network.yaml").write_text((CONF / "network/nvlink_25gbe.yaml").read_text())
    return folder


def plan_from_files(folder: Path) -> None:
    words = [f"schedule.{name}={folder / name}.json" for name in ("trace", "link", "select")]
    check_runs(compose_runs([[*TINY, *words]]))


def read_study(folder: Path) -> None:
    read_yaml.cache_clear()
    compose_runs(jobs_of(str(folder / "study.yaml"), []))


def read_status(folder: Path) -> None:
    run = RunFolder(folder / "runs/run")
    for read in (state_of, last_step, saved_step, failure_reason, failure_log, describe):
        read(run)
    other_code([run])


READERS: dict[str, Callable[[Path], object]] = {
    "trace.json": plan_from_files,
    "link.json": plan_from_files,
    "select.json": plan_from_files,
    "plan.json": lambda folder: Plan.load(folder / "plan.json"),
    "study.yaml": read_study,
    "network.yaml": lambda folder: load_network(folder / "network.yaml"),
    "runs/run/config.yaml": lambda folder: (
        saved_config(RunFolder(folder / "runs/run"), []),
        load(folder / "runs"),
    ),
    "runs/run/steps.jsonl": lambda folder: (load(folder / "runs"), read_status(folder)),
    "runs/run/epochs.jsonl": lambda folder: load(folder / "runs"),
    "runs/run/DONE": lambda folder: (load(folder / "runs"), read_status(folder)),
    "runs/run/manifest.json": read_status,
    "runs/run/.owner.json": lambda folder: RunFolder(folder / "runs/run").owner(),
    "runs/run/failure.json": read_status,
    "runs/run/checkpoints/step-00000006/CHECKPOINT.json": lambda folder: open_checkpoint(folder / "runs/run"),
}


FOUND = [  # what readers stumbled over
    b"\xf9",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"{a: " * 3000,
    b'{"rank": 1, "log": {}}',
    b'{"rank": 1e999, "step": 1e999, "ranks": 1e999, "records": 1e999, "git": [1]}',
    b'{"step": 1e999, "epoch": 0}\n',
    b'{"git": {"revision": 1, "diff_sha256": []}}',
    b'{"step": null, "epoch": 0}\n',
    b'{"epoch": 0, "step": 5, "time_s": [[]]}\n{"epoch": 1, "step": 10}\n',
]


def parsed(name: str, content: bytes) -> Any:
    """Return what a file holds: the rows of records, else one document."""
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in content.splitlines()]
    return yaml.safe_load(content) if name.endswith(".yaml") else json.loads(content)


def unparsed(name: str, held: Any) -> bytes:
    if name.endswith(".jsonl") and isinstance(held, list):
        return "".join(json.dumps(row) + "\n" for row in held).encode(errors="surrogatepass")
    text = yaml.safe_dump(held) if name.endswith(".yaml") else json.dumps(held)
    return text.encode(errors="surrogatepass")


@st.composite
def changed(draw: st.DrawFn, held: Any) -> Any:
    """Draw a document with one place of it replaced, removed, renamed or doubled."""
    if not isinstance(held, dict | list) or not held or draw(st.integers(0, 9)) == 9:
        return draw(ANYTHING)
    items = list(held.items()) if isinstance(held, dict) else list(enumerate(held))
    place = draw(st.integers(0, len(items) - 1))
    key, value = items[place]
    how = draw(st.sampled_from(["in", "in", "in", "in", "removed", "renamed", "doubled"]))
    if how == "in":
        items[place] = key, draw(changed(value))
    else:
        items[place : place + 1] = {"removed": [], "renamed": [(draw(st.text(max_size=5)), value)]}.get(
            how, [items[place]] * 2
        )
    return dict(items) if isinstance(held, dict) else [value for _, value in items]


@st.composite
def content_like(draw: st.DrawFn, name: str, content: bytes) -> bytes:
    """Draw the content of a file: changed as a document, or as bytes."""
    if draw(st.integers(0, 9)) < 6:
        return unparsed(name, draw(changed(parsed(name, content))))
    place = draw(st.integers(0, len(content)))
    end = draw(st.sampled_from([place, place + 1, place + 4, len(content)]))
    return content[:place] + draw(st.binary(max_size=4)) + content[end:]


@pytest.mark.parametrize("name", READERS)
def test_any_content_is_read_or_refused(name: str, originals: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    copytree(originals, folder)
    whole = (folder / name).read_bytes()
    READERS[name](folder)

    @settings(
        max_examples=NUMBER or 10,
        derandomize=not NUMBER,
        database=None,
        deadline=20_000 if NUMBER else None,
        suppress_health_check=list(HealthCheck),
    )
    @given(content_like(name, whole))
    def read(content: bytes) -> None:
        (folder / name).write_bytes(content)
        before = sorted(folder.rglob("*"))
        with contextlib.suppress(UserError, BadFile):  # a command prints them in one line, whatever they quote
            READERS[name](folder)
        assert sorted(folder.rglob("*")) == before

    for content in FOUND:
        read.hypothesis.inner_test(content)  # type: ignore[attr-defined]
    read()
