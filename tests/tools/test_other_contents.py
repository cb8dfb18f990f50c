"""Whatever is in a file that comes from elsewhere, it is read or refused: every place of it replaced in turn."""

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from experiments.config import CONF
from experiments.config.compose import compose_runs
from experiments.config.conf_files import read_yaml
from experiments.config.errors import UserError
from experiments.config.keys import to_yaml
from experiments.config.networks import load_network
from experiments.planning.documents import BadFile
from experiments.planning.schedules.base import Plan
from experiments.planning.tables import Curve, LinkTable, SelectTable
from experiments.planning.traces import Layer, Trace
from experiments.reports.frames import load
from experiments.runs.checkpoints import open_checkpoint
from experiments.runs.manifest import other_code
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import failure_log, failure_reason, last_step, saved_step, state_of, status_of
from experiments.sweeps.listing import describe
from experiments.sweeps.rerun import saved_config
from experiments.sweeps.study import jobs_of
from experiments.training.preflight import check_runs
from tests.finished_runs import finished
from tests.tools.simulated_runs import IMAGES, configured
from tests.tools.study_folders import write_run

TINY = ["model=mlp", "model.settings.hidden=4", "dataset=synthetic", "cluster.nproc_per_node=2", "schedule=mgwfbp"]
LAYERS = (5, 160, 40), (3, 64, 16), (1, 1024, 16)  # of this model: its number, bytes of its weight, of its bias
NUMBER = 8  # of documents that are tried of each file
NASTY: list[Any] = [None, True, -1, 0.5, 10**400, float("nan"), "", "a" * 5000, "${seed}", [], {}, [[]], {"a": {}}]


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
    folder = tmp_path_factory.mktemp("files")
    write_profiles(folder)
    run = write_run(folder / "runs", "topk", epochs=2, per_epoch=3).rename(folder / "runs/run")
    (run / "config.yaml").write_text(to_yaml(configured(folder / "runs", *IMAGES, "sparsifier=topk")))
    finished(RunFolder(run))
    (folder / "runs/run/failure.json").write_text('{"rank": 1, "message": "no", "log": "x"}')
    (folder / "runs/run/.owner.json").write_text(json.dumps({"host": "here", "pid": 1, "job": "", "since": "now"}))
    checkpoint = folder / "runs/run/checkpoints/step-00000006"
    checkpoint.mkdir(parents=True)
    digest = {"bytes": 5, "sha256": "0" * 64}
    held = {"step": 6, "epoch": 0, "ranks": [digest] * 3, "records": {"steps.jsonl": digest}}
    (checkpoint / "CHECKPOINT.json").write_text(json.dumps(held))
    (folder / "study.yaml").write_text(
        "overrides: [epochs=2]\ngrid: {seed: [0, 1], sparsifier: [topk, [sparsifier=micro, lr=1]]}\n"
    )
    preset = {"name": "nvlink_25gbe", **OmegaConf.load(CONF / "networks.yaml").nvlink_25gbe}
    (folder / "network.yaml").write_text(OmegaConf.to_yaml(preset))
    return folder


def plan_from_files(folder: Path) -> None:
    words = [f"schedule.{name}={folder / name}.json" for name in ("trace", "link", "select")]
    check_runs(compose_runs([[*TINY, *words]]))


def read_study(folder: Path) -> None:
    read_yaml.cache_clear()
    compose_runs(jobs_of(str(folder / "study.yaml"), []))


def read_status(folder: Path) -> None:
    run = RunFolder(folder / "runs/run")
    for read in (state_of, last_step, saved_step, failure_reason, failure_log):
        read(run)
    other_code([run])
    describe(run, status_of(run))


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


def replaced(held: Any) -> Iterator[Any]:
    """Yield a document with one place of it replaced, or taken away, each in turn."""
    if isinstance(held, dict):
        for key, value in held.items():
            yield {k: v for k, v in held.items() if k != key}
            yield from ({**held, key: new} for new in replaced(value))
    elif isinstance(held, list):
        for place, value in enumerate(held):
            yield held[:place] + held[place + 1 :]
            yield from ([*held[:place], new, *held[place + 1 :]] for new in replaced(value))
    yield from NASTY


def wrong_contents(name: str, content: bytes) -> Iterator[bytes]:
    """Yield contents that a file may have instead: other documents, or other bytes."""
    draw = random.Random(name)
    whole = content.splitlines(keepends=True) if name.endswith(".jsonl") else [content]
    place = draw.randrange(len(whole))
    is_yaml = name.endswith(".yaml")
    documents = list(replaced(yaml.safe_load(whole[place])))
    for document in draw.sample(documents, min(len(documents), NUMBER)):
        text = yaml.safe_dump(document) if is_yaml else json.dumps(document) + "\n"
        yield b"".join([*whole[:place], text.encode(), *whole[place + 1 :]])
    for _ in range(2):
        at = draw.randrange(len(content))
        yield content[:at] + draw.randbytes(3) + content[at + draw.choice((0, 1, 4, len(content))) :]


@pytest.mark.parametrize("name", READERS)
def test_any_content_is_read_or_refused(name: str, originals: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    copytree(originals, folder)
    whole = (folder / name).read_bytes()
    READERS[name](folder)
    for content in (*FOUND, *wrong_contents(name, whole)):
        (folder / name).write_bytes(content)
        before = sorted(folder.rglob("*"))
        with contextlib.suppress(UserError, BadFile):  # a command prints them in one line, whatever they quote
            READERS[name](folder)
        assert sorted(folder.rglob("*")) == before
