"""A wrong command is one line with the key, what was given and what is allowed; it exits with 2 and starts nothing."""

import dataclasses
import os
import shlex
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from experiments.config.checks import CHOICES, RANGES, TEXTS
from experiments.config.compose import compose_run
from experiments.config.errors import UserError
from experiments.config.hydra_errors import kind_of
from experiments.config.schema import TrainConfig, defaults_of_schema, flat, from_yaml, to_yaml
from tests.drawn import ANYTHING
from tests.in_process import call
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
LONG, DIGITS, DEEP = "a" * 5000, "9" * 5000, "a/" * 2500

pytestmark = pytest.mark.xdist_group("bad input")  # one process imports all entry points

# A row is a command and what its line must have; without that, the last word's key or option and its value.
WRONG: list[str | tuple[str, ...]] = [
    # Hydra's grammar
    ("train 'seed=int(a)'", "seed=int(a)"),
    ("train 'seed=\"1'", "cannot read"),
    ("train ' seed=1'", "cannot read"),
    ("train =5", "=5"),
    ("train seed = 1", "'seed' is not KEY=VALUE"),
    ("train ''", "KEY=VALUE"),
    ("train '~'", "'~'"),
    ("train '😀=1'", "😀=1"),
    ("train 'seed=${oc.env:NOPE}'", "seed", "NOPE"),
    ("train 'output=${nothing}'", "nothing"),
    ("train \"output='\\\\${seed}'\"", "output", "${"),
    ("train 'seed=???'", "seed", "missing"),
    ("train 'seed=choice(1,2)'", "seed=choice(1,2)", "-m"),
    ("train seed=0,1", "seed=0,1", "-m"),
    ("train -m 'seed=range(100000000000)'", "10000", "-m"),
    ("train -m 'seed=interval(1,2)'", "seed=interval(1,2)", "seed=A,B"),
    ("train -m 'hydra.sweeper.params.seed=interval(1,2)'", "seed", "interval(1,2)"),
    ("train -m 'seed=glob(x)'", "seed=glob(x)"),
    ("train -m seed=1,1", "two runs", "folder"),
    ("train -m seed=3 epochs=1,0", "epochs", "got 0"),
    ("train '~seed'", "seed", "cannot be removed"),
    ("train '~model'", "model", "missing"),
    ("train +seed=1", "seed"),
    ("train ++densty=0.1", "densty", "did you mean 'density'"),
    ("train ++cluster.slurm.cpus=1", "cpus", "cluster.slurm"),
    ("train experiment=null", "experiment", "~experiment"),
    ("train sparsifier=mikro", "sparsifier", "did you mean 'micro'"),
    ("train network=ideal", "network", "experiments.simulate"),
    ("train model@foo=mlp", "model@foo"),
    ("train sparsifier.feedback.name=momentum", "sparsifier.feedback", "set sparsifier.feedback=VALUE"),
    # Hydra's options
    ("train --foo", "--foo"),
    ("train --cfg jobb", "--cfg", "jobb"),
    ("train --multirun seed=1,2 --cfg job", "--multirun", "--cfg"),
    ("train --resolve seed=1", "--resolve"),
    ("train --config-name nope", "nope"),
    ("train --config-dir /nope", "/nope"),
    "train hydra/launcher=nope",
    ("train hydra.foo=1", "foo"),
    # what is of any length, and what no text has
    ("train output=LONG", "output", "5000"),
    ("train output=DEEP", "output"),
    ("train seed=DIGITS", "seed"),
    ("train LONG=1", "aaa"),
    ("train \"output='aNULb'\"", "output"),
    ("train BYTE=1", "\\udce9"),
    # files and folders
    "train output=empty",
    "train output=/proc/x",
    ("train start_from=nowhere", "nowhere"),
    ("train start_from=folder", "folder"),
    ("train dataset.root=5 dataset=cifar10", "5/cifar-10-batches-py", "data.prepare"),
    ("train schedule=exact schedule.trace=empty schedule.link=empty", "empty", "JSON"),
    ("train schedule=exact schedule.trace=binary schedule.link=binary", "binary", "JSON"),
    ("train schedule=exact schedule.trace=folder schedule.link=folder", "folder", "directory"),
    "train cluster.device=cuda",
    # studies
    ("sweep", "NAME"),
    ("sweep nothing", "study", "nothing"),
    ("sweep empty.yaml", "empty.yaml", "overrides"),
    ("sweep binary", "study", "binary"),
    ("sweep list.yaml", "list.yaml", "mapping"),
    ("sweep broken.yaml", "broken.yaml"),
    ("sweep recursive.yaml", "recursive.yaml"),
    ("sweep dir.yaml", "dir.yaml", "directory"),
    ("sweep loop.yaml", "loop.yaml"),
    ("sweep grid.yaml", "grid.seed", "3"),
    ("sweep axis.yaml", "peak_tflops", "resnet8"),
    ("sweep null.yaml", "None"),
    ("sweep huge.yaml", "1000000000000"),
    ("sweep LONG.yaml", "path"),
    "sweep demo --jobs 0",
    "sweep demo --backend x",
    "sweep demo epochs=abc",
    ("sweep demo seed=1", "two runs", "folder"),
    ("sweep demo demo", "'demo'"),
    ("sweep demo hydra.run.dir=x", "hydra.run.dir=x"),
    "sweep status demo output=empty",
    ("sweep rerun", "RUN"),
    ("sweep rerun folder", "folder", "config.yaml"),
    # figures and pages
    ("figures --runs nowhere", "nowhere", "experiments.train"),
    "figures --only foo",
    ("figures --source x y", "--source", "'x'"),
    ("figures --source wandb a", "ENTITY/PROJECT", "a"),
    ("figures --source wandb-files folder", "folder"),
    ("figures seed=", "seed="),
    ("figures foo", "foo"),
    ("pages lnog", "page", "lnog", "did you mean 'long'"),
    ("pages --runs nowhere", "nowhere"),
    # tools
    ("advise", "--link-mbit"),
    "advise --link-mbit 0",
    "advise --link-mbit 9 --workers 1",
    "advise --link-mbit 9 --level 50",
    ("advise --link-mbit 9 --evidence nowhere", "nowhere"),
    ("advise --link-mbit 9 --evidence binary", "binary"),
    "advise --link-mbit 9 --task gpt-text",
    "staleness --steps 0",
    ("staleness --methods micr", "micr", "did you mean 'micro'"),
    "simulate --workers 99999999999999999999",
    "simulate --workers ''",
    ("simulate --trace nowhere", "nowhere"),
    ("simulate --trace binary", "binary", "JSON"),
    ("simulate --trace list", "list", "micro-trace-1"),
    ("simulate --network nope", "network", "nope"),
    ("simulate --network list.yaml", "list.yaml", "mapping"),
    ("simulate --network binary.yaml", "binary.yaml"),
    ("simulate --algorithm nope", "algorithm", "nope"),
    ("simulate --intra nope", "--intra"),
    ("simulate --two-level", "k80_10gbe"),
    ("simulate --schedules nope", "schedules", "nope"),
    "simulate --density abc",
    ("simulate --select list", "list", "micro-select-1"),
    "simulate --compute-s nan",
    ("simulate foo", "foo"),
    ("simulate --nope", "--nope"),
    ("compare --methods nope", "methods", "nope"),
    ("compare --streams nope", "streams", "nope"),
    ("compare --world-sizes 1000000", "1000000", "GB"),
    "compare --densities 0",
    "compare --equal-bytes nope",
    "compare --max-gb a",
    ("compare sede=1", "sede", "did you mean 'seed'"),
    "compare model=nope",
    ("compare --methods topk seed=1 --steps 2 lr=1", "lr=1"),
    "theory --steps a",
    ("theory sparsifier=dense", "sparsifier=dense"),
    ("bench", "benchmark"),
    ("bench nope", "nope"),
    "bench step --density 2",
    ("bench step --methods nope", "methods", "nope"),
    "bench step --nproc 1000000",
    ("bench network --rates fast", "rate", "fast"),
    ("bench network --methods topk:nope", "schedule", "nope"),
    ("profile", "backward|link|select"),
    "profile backward --device x",
    "profile backward --device cuda",
    "profile backward --out folder",
    ("profile link --sizes 1,2", "--sizes", "1,2"),
    ("profile link --nproc 1", "--nproc", "1"),
    ("profile select --numel 5", "--numel", "5"),
    ("profile backward sparsifier=topk", "sparsifier=topk"),
    ("reproduce", "paper"),
    ("reproduce micr", "paper", "micr", "did you mean 'micro'"),
    ("reproduce micro --scale big", "scale", "big"),
    ("reproduce micro --scale paper --root folder", "folder/cifar-10-batches-py"),
    "reproduce micro --root /nope",
    "reproduce micro epochs=0",
    ("reproduce micro output=x", "output=x", "--out"),
    "doctor --nproc 1000000",
    "doctor --link-mbit ''",
    "doctor --latency-us nan",
    ("doctor --latency-us 5", "--latency-us"),
    ("track", "RUN_FOLDER"),
    ("track folder", "folder", "config.yaml"),
    "track folder --mode sideways",
    *((f"{command} --out empty", "empty") for command in ("compare", "theory", "figures", "bench step")),
]
FILES: dict[str, bytes] = {
    **dict.fromkeys(("empty", "empty.yaml"), b""),
    **dict.fromkeys(("binary", "binary.yaml"), bytes(range(256))),
    **dict.fromkeys(("list", "list.yaml"), b"[1,2]"),
    "broken.yaml": b"overrides: [\n",
    "grid.yaml": b"overrides: []\ngrid: {seed: 3}\n",
    "axis.yaml": b"overrides: []\ngrid: {run: [[seed=1], [seed=2, peak_tflops=1]]}\n",
    "null.yaml": b"overrides: [null]\ngrid: {seed: [1]}\n",
    "recursive.yaml": b"overrides: &a [*a]\ngrid: {seed: [1]}\n",
    "huge.yaml": b"overrides: []\ngrid: {" + b",".join(b"k%d: [1,2,3,4,5,6,7,8,9,10]" % i for i in range(12)) + b"}\n",
}
VARIABLES = [
    ({"WANDB_MODE": "sideways"}, "train tracking=wandb", "WANDB_MODE"),
    ({"WANDB_MODE": "sideways"}, "figures --source wandb a/b", "WANDB_MODE"),
    ({"HYDRA_FULL_ERROR": "sideways"}, "train --cfg job sede=1", "sede"),
    ({"OMP_NUM_THREADS": "-1"}, "sweep demo", "OMP_NUM_THREADS"),
    ({}, "train \"output='~no_such_user/x'\"", "~no_such_user/x"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to call commands in, with files that are wrong in many ways."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "dir.yaml").mkdir()
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "results").mkdir()
    (folder / "results/published").symlink_to(ROOT / "results/published")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder, and every folder in it."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def words_of(command: str) -> list[str]:
    """Return the words of a row, with what LONG, DEEP, DIGITS, NUL and BYTE stand for."""
    long = command.replace("LONG", LONG).replace("DEEP", DEEP).replace("DIGITS", DIGITS)
    return [word.replace("NUL", "\0").replace("BYTE", "\udce9") for word in shlex.split(long)]


def parts_of(row: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return what the line of a row must have."""
    if isinstance(row, tuple):
        return row[1:]
    *_, option, last = shlex.split(row)
    return (option, last) if option.startswith("--") else (last.split("=")[0], last.split("=")[1])


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row if isinstance(row, str) else row[0])
def test_a_wrong_command_is_one_line_and_leaves_nothing(
    row: str | tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = content(folder)
    key, *others = parts_of(row)
    line = refused(words_of(row if isinstance(row, str) else row[0]), key)
    assert all(part in line for part in others), line
    assert content(folder) == before


def test_every_command_is_in_the_table() -> None:
    commands = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}
    assert {(row if isinstance(row, str) else row[0]).split()[0] for row in WRONG} == commands


@pytest.mark.parametrize(("variables", "command", "part"), VARIABLES)
def test_a_wrong_variable_is_one_line(
    variables: dict[str, str], command: str, part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(command, part)


@pytest.mark.parametrize("command", ["train epochs=0", "sweep demo seed=a", "figures", "track folder"])
def test_a_folder_that_was_removed_is_one_line(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    refused(command, "")


# Rows from the schema: every setting is refused what is of another type, out of its range, or none of its choices.

KEYS = [key for key in flat(defaults_of_schema()) if key != "digests"]
GROUPS = [field.name for field in dataclasses.fields(TrainConfig) if dataclasses.is_dataclass(kind_of(field.name))]
NEEDED = {"tracking": ["tracking=wandb"], "rounds": ["rounds.every=5"]}  # without these a setting has no effect


def wrong_values(key: str) -> Iterator[str]:
    """Yield values that a setting cannot have."""
    kind = kind_of(key)
    kind = typing.get_origin(kind) or kind
    yield from {
        int: ["a", "1.5", "''", str(10**20)],
        float: ["a", "nan", "inf", "''"],
        bool: ["5", "a"],
        list: ["3", "null"],
        dict: ["1", "null"],
    }.get(kind, [])
    if key in CHOICES:
        yield "nonesuch"
    if key in TEXTS:
        yield {"cluster.slurm.extra": "[a]", "tracking.tags": "['']"}.get(key, "''")
    if key in RANGES:
        below = RANGES[key].lowest - (0 if RANGES[key].above else 1)
        yield f"[{below}, {below}]" if kind is list else f"{below:g}"


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_is_refused_what_it_cannot_be(key: str) -> None:
    for value in wrong_values(key):
        words = [*NEEDED.get(key.split(".")[0], []), f"{key}={value}"]
        refused(lambda words=words: compose_run(words), key.removesuffix(".name"), value.strip("'[]").split(",")[0])


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_refused_other_keys_and_the_loss_of_its_own(group: str) -> None:
    name = dataclasses.fields(kind_of(group))[0].name
    refused(lambda: compose_run([f"++{group}.{name}x=1"]), group, f"did you mean '{name}'")
    refused(lambda: compose_run([f"~{group}.{name}"]), f"{group}.{name}")
    refused(lambda: compose_run([f"++{group}=5"]), group, 5)


# Any settings at all


def likely(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type of the schema."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(likely, inner))
    if origin is list:
        return st.lists(likely(inner[0]), max_size=3)
    return {int: st.integers(), float: st.floats(0, 2), bool: st.booleans()}.get(kind, ANYTHING)


def written(value: Any) -> str:
    """Return a value in Hydra's grammar, or nearly so."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else repr(value)


def values_of(key: str) -> st.SearchStrategy[Any]:
    """Return values of a setting: right ones, and any."""
    return st.one_of(likely(kind_of(key)), st.sampled_from(CHOICES.get(key, ("x",))), ANYTHING)


WORD = st.sampled_from(KEYS).flatmap(lambda key: values_of(key).map(lambda value: f"{key}={written(value)}"))
WORDS = st.lists(WORD, min_size=1, max_size=3)
NUMBER = int(os.environ.get("MICRO_FUZZ", "0"))  # of other examples than those of every run


@pytest.mark.timeout(0 if NUMBER else 600)
def test_any_settings_are_a_run_or_refused_in_one_line(tmp_path: Path) -> None:
    set_hypothesis_home_dir(tmp_path)

    @settings(
        max_examples=NUMBER or 150,
        derandomize=not NUMBER,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(words=WORDS)
    def check(words: list[str]) -> None:
        try:
            config = compose_run(words)
        except UserError as error:
            line = str(error)
            assert line
            assert "\n" not in line
        else:
            (tmp_path / "config.yaml").write_text(to_yaml(config))
            assert to_yaml(from_yaml(tmp_path / "config.yaml")) == to_yaml(config)

    check()


def test_a_command_whose_parts_do_not_fit_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    called = call(["train", "sparsifier=cltk", "sparsifier.exchange=gather", "output=runs"])
    assert (called.code, called.err.count("\n"), os.listdir()) == (2, 1, [])
