"""A wrong command is one line with the key, what was given and what is allowed; it exits with 2 and starts nothing."""

import dataclasses
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.config.compose import compose_run
from experiments.config.keys import defaults_of_schema, flat, kind_of
from experiments.config.ranges import OneOf, Range, Text
from experiments.config.schema import TrainConfig
from tests.refusals import refused

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.xdist_group("bad input")  # one process imports all entry points

# A row is a command and what its line must have; without that, the last word's key or option and its value.
WRONG: list[str | tuple[str, ...]] = [
    # Hydra's grammar
    ("train 'seed=\"1'", "cannot read"),
    ("train =5", "=5"),
    ("train seed = 1", "'seed' is not KEY=VALUE"),
    ("train 'seed=${oc.env:NOPE}'", "seed", "NOPE"),
    ("train 'output=${nothing}'", "nothing"),
    ("train \"output='\\\\${seed}'\"", "output", "${"),
    ("train 'seed=???'", "seed", "missing"),
    ("train seed=0,1", "seed=0,1", "-m"),
    ("train -m 'seed=range(100000000000)'", "10000", "-m"),
    ("train -m 'seed=interval(1,2)'", "seed=interval(1,2)", "seed=A,B"),
    ("train -m hydra/sweeper=nevergrad seed=1,2", "nevergrad", "hydra-nevergrad-sweeper"),
    ("train -m seed=1,1", "two runs", "folder"),
    ("train -m seed=3 epochs=1,0", "epochs", "got 0"),
    ("train '~seed'", "seed", "cannot be removed"),
    ("train '~model'", "model", "missing"),
    ("train ++densty=0.1", "densty", "did you mean 'density'"),
    ("train experiment=null", "experiment", "~experiment"),
    ("train sparsifier=mikro", "sparsifier", "did you mean 'micro'"),
    ("train network=ideal", "network"),
    ("train sparsifier.feedback.name=momentum", "sparsifier.feedback", "set sparsifier.feedback=VALUE"),
    # Hydra's options
    ("train --foo", "--foo"),
    ("train --cfg jobb", "--cfg", "jobb"),
    ("train --lr=0.05 --seed=1", "--lr=0.05", "dashes, lr=0.05;", "${args_no_hyphens}"),
    ("train --experiment=cifar10_small", "dashes, experiment=cifar10_small;"),
    ("train hydra.run.dir=empty/x", "hydra.run.dir", "Not a directory"),
    ('train "output=it\'s"', "it's", "quotes of the other kind"),
    ("train --multirun seed=1,2 --cfg job", "--multirun", "--cfg"),
    ("train --config-name nope", "nope"),
    ("train --config-dir /nope", "/nope"),
    "train hydra/launcher=nope",
    # what is of any length, and what no text has
    ("train output=LONG", "output", "5000"),
    ("train seed=DIGITS", "seed"),
    # files and folders
    "train output=empty",
    "train output=/proc/x",
    ("train start_from=nowhere", "nowhere"),
    ("train dataset.root=5 dataset=cifar10", "5/cifar-10-batches-py", "data.prepare"),
    ("train schedule=exact schedule.trace=empty schedule.link=empty", "empty", "JSON"),
    "train cluster.device=cuda",
    ("train model=lstm_small dataset=manuals dataset.drawn=5", "dataset.drawn", "lstm"),
    "train dataset.drawn=5",
    ("train model=gpt_small dataset=text dataset.root=parts", "parts holds train/xaa", "endings to txt,none"),
    ("train model=gpt_small dataset=text dataset.root=tested", "tested holds test.txt", "no file of train"),
    ("train model=gpt_small dataset=text dataset.root=corpus", "corpus holds enwik8", "README.md", "endings to"),
    # studies
    ("sweep", "NAME"),
    ("sweep nothing", "study", "nothing"),
    ("sweep empty.yaml", "empty.yaml", "overrides"),
    ("sweep broken.yaml", "broken.yaml"),
    ("sweep grid.yaml", "grid.seed", "3"),
    ("sweep axis.yaml", "peak_tflops", "resnet8"),
    ("sweep huge.yaml", "1000000000000"),
    "sweep demo --jobs 0",
    "sweep demo --jobs many",
    ("sweep demo jobs=4", "'jobs'"),
    ("sweep status dmeo", "did you mean 'demo'", "dmeo"),
    ("sweep rerun nothing", "name the folder of a run", "nothing"),
    ("sweep last.yaml", "sparsifier", "mikro"),
    "sweep demo epochs=abc",
    ("sweep demo seed=1", "two runs", "folder"),
    ("sweep demo hydra.run.dir=x", "hydra.run.dir=x"),
    ("sweep rerun", "RUN"),
    ("sweep rerun folder", "folder", "config.yaml"),
    # figures and pages
    ("figures --runs nowhere", "nowhere", "experiments.train"),
    "figures --only foo",
    ("figures --source wandb a", "ENTITY/PROJECT", "a"),
    ("pages lnog", "page", "lnog", "did you mean 'long'"),
    ("pages --runs nowhere", "nowhere"),
    # tools
    "simulate --workers 99999999999999999999",
    ("simulate --trace nowhere", "nowhere"),
    ("simulate --network nope", "network", "nope"),
    ("simulate --two-level", "k80_10gbe"),
    ("simulate --schedules nope", "schedules", "nope"),
    ("simulate --trace trace.json --methods randomk", "randomk"),
    ("simulate --trace trace.json --only border", "borders"),
    ("simulate --trace trace.json --ranks-per-node 4", "--ranks-per-node"),
    ("simulate --trace trace.json --two-level --network nvlink_25gbe --workers 8,12", "nodes of 8"),
    ("simulate --trace trace.json --network nvlink_25gbe --algorithm best", "best"),
    ("simulate --trace trace.json --two-level --network nvlink_25gbe --select x.json", "--select"),
    ("simulate --trace trace.json --network nowhere.json", "nowhere.json"),
    "simulate --trace trace.json --compute-s -1",
    ("compare --methods nope", "methods", "nope"),
    ("compare --streams normal --world-sizes 1000000", "1000000", "GB"),
    ("compare --world-sizes 2 4", "KEY=VALUE", "4"),
    ("compare seed=1 --steps 2 batch_size=0", "batch_size", "0"),
    ("compare sede=1", "sede", "did you mean 'seed'"),
    "theory --steps a",
    ("theory sparsifier=dense", "sparsifier=dense"),
    ("bench", "benchmark"),
    "bench step --density 2",
    ("bench step --numel 1", "--numel", "2"),
    ("profile select --numel 1,10", "--numel", "1,10"),
    ("bench step --methods nope", "methods", "nope"),
    ("bench network --rates fast", "rate", "fast"),
    ("profile", "backward|link|select"),
    "profile backward --device x",
    ("profile link --sizes 1,2", "--sizes", "1,2"),
    ("profile link --nproc 1", "--nproc", "1"),
    ("profile backward model=resnet21", "resnet21", "did you mean 'resnet20'"),
    ("profile link --sizes 64,66", "--sizes", "64,66"),
    "profile link --repeats 2",
    ("profile link --out .", "--out must be a file", "."),
    ("profile select --methods topq", "topq", "did you mean 'topk'"),
    ("profile backward sparsifier=topk", "sparsifier=topk"),
    ("reproduce", "paper"),
    ("reproduce micr", "paper", "micr", "did you mean 'micro'"),
    ("reproduce micro --scale smal", "smal", "did you mean 'small'"),
    ("reproduce fft --scale medium", "choose one of small, paper"),
    ("reproduce mgwfbp --scale paper --root folder", "folder/imagenet"),
    "reproduce micro epochs=0",
    "doctor --nproc 1000000",
    ("doctor --latency-us 5", "--latency-us"),
    "doctor --nproc two",
    "doctor --link-mbit nan",
    ("track", "RUN_FOLDER"),
    ("track folder", "folder", "config.yaml"),
    *((f"{command} --out empty", "empty") for command in ("compare", "theory", "figures", "bench step")),
]
FILES: dict[str, bytes] = {
    **dict.fromkeys(("empty", "empty.yaml"), b""),
    **dict.fromkeys(("binary", "binary.yaml"), bytes(range(256))),
    **dict.fromkeys(("list", "list.yaml"), b"[1,2]"),
    "broken.yaml": b"overrides: [\n",
    "grid.yaml": b"overrides: []\ngrid: {seed: 3}\n",
    "last.yaml": b"overrides: [model=mlp, dataset=synthetic]\ngrid: {sparsifier: [micro, topk, mikro]}\n",
    **dict.fromkeys(("parts/train/xaa", "parts/test.txt", "tested/test.txt", "corpus/enwik8"), b"words " * 999),
    "corpus/README.md": b"of words\n",
    "trace.json": b'{"format": "micro-trace-1", "model": "mlp", "forward_s": 1, "backward_s": 1, '
    b'"layers": [{"name": "0.weight", "num_bytes": 4000, "ready_s": 0.1}]}',
    "axis.yaml": b"overrides: []\ngrid: {run: [[seed=1], [seed=2, peak_tflops=1]]}\n",
    "huge.yaml": b"overrides: []\ngrid: {" + b",".join(b"k%d: [1,2,3,4,5,6,7,8,9,10]" % i for i in range(12)) + b"}\n",
}
VARIABLES = [
    ({"WANDB_MODE": "sideways"}, "train tracking=wandb", "WANDB_MODE"),
    ({"WANDB_MODE": "sideways"}, "figures --source wandb a/b", "WANDB_MODE"),
    ({"HYDRA_FULL_ERROR": "sideways"}, "train --cfg job sede=1", "sede"),
    ({}, "train \"output='~no_such_user/x'\"", "~no_such_user/x"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to call commands in, with files that are wrong in many ways."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "results").mkdir()
    (folder / "results/published").symlink_to(ROOT / "results/published")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder, and every folder in it."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def words_of(command: str) -> list[str]:
    """Return the words of a row, with what LONG and DIGITS stand for."""
    return shlex.split(command.replace("LONG", "a" * 5000).replace("DIGITS", "9" * 5000))


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
    refused(words_of(row if isinstance(row, str) else row[0]), *parts_of(row))
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


# Rows from the schema: every setting is refused what is of another type, out of its range, or none of its choices.

KEYS = [key for key in flat(defaults_of_schema()) if key != "digests"]
GROUPS = [field.name for field in dataclasses.fields(TrainConfig) if dataclasses.is_dataclass(kind_of(field.name)[0])]
NEEDED = {"tracking": ["tracking=wandb"], "rounds": ["rounds.every=5"]}  # without these a setting has no effect


def wrong_values(key: str) -> Iterator[str]:
    """Yield values that a setting cannot have."""
    kind, allowed = kind_of(key)
    kind = typing.get_origin(kind) or kind
    yield from {
        int: ["a", "1.5"],
        float: ["a", "nan"],
        bool: ["a"],
        list: ["3"],
        dict: ["1"],
    }.get(kind, [])
    if isinstance(allowed, OneOf):
        yield "nonesuch"
    if isinstance(allowed, Text) and not key.endswith("name"):
        yield {"cluster.slurm.extra": "[a]", "tracking.tags": "['']"}.get(key, "''")
    if isinstance(allowed, Range):
        below = allowed.lowest - (0 if allowed.above else 1)
        yield f"[{below}, {below}]" if kind is list else f"{below:g}"


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_is_refused_what_it_cannot_be(key: str) -> None:
    for value in wrong_values(key):
        words = [*NEEDED.get(key.split(".")[0], []), f"{key}={value}"]
        refused(lambda words=words: compose_run(words), key.removesuffix(".name"), value.strip("'[]").split(",")[0])


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_refused_other_keys_and_the_loss_of_its_own(group: str) -> None:
    name = dataclasses.fields(kind_of(group)[0])[0].name
    refused(lambda: compose_run([f"++{group}.{name}x=1"]), group, f"did you mean '{name}'")
    refused(lambda: compose_run([f"~{group}.{name}"]), f"{group}.{name}")
    refused(lambda: compose_run([f"++{group}=5"]), group, 5)
