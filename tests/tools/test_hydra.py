"""What a user of Hydra types at experiments.train works as its documentation says; a grid is one by -m and sweep."""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from tests.in_process import Called, call

TINY = ["dataset=synthetic", "dataset.settings.num_samples=64", "model=mlp", "epochs=1", "cluster=simulated"]
SHORT = ["dataset.settings={num_train: 2000, num_test: 200}", "batch_size=16", "epochs=1", "output=runs"]
WORDS = [*TINY, "cluster.world_size=2", "output=runs"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*words: str) -> Called:
    called = call(["train", *words])
    assert called.code == 0, called
    return called


def study(name: str, overrides: Iterable[str], grid: object) -> str:
    path = Path(name).absolute()
    path.write_text(yaml.safe_dump({"overrides": list(overrides), "grid": grid}))
    return str(path)


def listed(study: str) -> list[str]:
    """Return the names of a study's runs."""
    called = call(["sweep", study, "--list"])
    assert called.code == 0, called
    return [line.rpartition("/")[2] for line in called.out.splitlines() if line.startswith("not started")]


def runs() -> set[str]:
    return {path.parent.name for path in Path("runs").glob("*/DONE")}


@pytest.mark.parametrize(
    "words",
    [
        [*WORDS, "sparsifier=dense"],
        ["experiment=micro_lstm_wikitext2", "scale=small", "model=gpt_small", *SHORT],
        ["experiment=cifar10_small", *WORDS, "sparsifier=fp16", "lr_milestones=[2]", "seed=3"],
    ],
)
def test_what_cfg_prints_is_what_runs(words: list[str]) -> None:
    printed = yaml.safe_load(train(*words, "--cfg", "job").out)
    train(*words)
    (path,) = Path("runs").glob("*/config.yaml")
    assert printed == yaml.safe_load(path.read_text())


def test_options_stand_before_and_after_words() -> None:
    printed = {train(*words).out for words in (["--cfg", "job", "lr=1", "seed=2"], ["lr=1", "--cfg", "job", "seed=2"])}
    assert len(printed) == 1
    train(*WORDS, "hydra/launcher=basic", "-m", "seed=0,1")
    assert len(runs()) == 2


def test_paths_mean_the_folder_of_the_command_wherever_hydra_changes_to() -> None:
    Path("texts").mkdir()
    shutil.copy(__file__, "texts/some.txt")
    words = ["dataset=text", "dataset.root=texts", "model=gpt_small", "dataset.sequence_length=8", *WORDS[3:]]
    train("-m", *words, "hydra.job.chdir=true", "hydra.sweep.dir=files", "seed=0,1")
    assert len(runs()) == 2
    assert Path("files/1/.hydra/overrides.yaml").exists()
    assert not list(Path("files").rglob("DONE"))


def test_hydra_has_its_files_where_it_is_told() -> None:
    train(*WORDS, "hydra.run.dir=files/here")
    assert (len(runs()), Path("files/here/.hydra/config.yaml").exists()) == (1, True)
    train(*WORDS, "seed=1", "hydra.run.dir=files/there", "hydra.output_subdir=null")
    assert (len(runs()), list(Path("files/there").iterdir())) == (2, [])


class Ends(Sweeper):
    """A sweeper that chooses its runs by itself, as Optuna does: both ends of an interval."""

    returned: list[object]

    def setup(self, *, hydra_context: object, task_function: object, config: object) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: Sequence[str]) -> None:
        (asked,) = [word for word in arguments if "interval" in word]
        rest = [word for word in arguments if word != asked]
        ends = asked.removeprefix("lr=interval(").removesuffix(")").split(",")
        jobs = self.launcher.launch([[f"lr={end}", *rest] for end in ends], initial_job_idx=0)
        Ends.returned = [job.return_value for job in jobs]


@pytest.fixture
def _other_sweeper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.ends", sys.modules[__name__])  # where Hydra looks for plugins
    monkeypatch.setattr(Ends, "__module__", "hydra_plugins.ends")
    Plugins.instance().register(Ends)
    ConfigStore.instance().store(group="hydra/sweeper", name="ends", node={"_target_": "hydra_plugins.ends.Ends"})


@pytest.mark.usefixtures("_other_sweeper")
def test_a_sweeper_chooses_the_runs_and_is_given_what_each_measured() -> None:
    for _ in ("run", "already done"):
        train("-m", *WORDS, "hydra/sweeper=ends", "lr=interval(0.1,0.2)")
        rows = [json.loads(path.read_text().splitlines()[-1]) for path in Path("runs").glob("*/epochs.jsonl")]
        assert sorted(map(float, Ends.returned)) == sorted(row["accuracy"] for row in rows)  # type: ignore[arg-type]
    assert len(runs()) == 2


@pytest.mark.usefixtures("_other_sweeper")
def test_a_run_that_fails_is_for_the_sweeper_to_judge_and_told_in_one_line() -> None:
    failed = call(["train", "-m", *WORDS, "hydra/sweeper=ends", "lr=interval(1e30,0.1)", "epochs=4"])
    assert (failed.code, failed.err.count("error:"), "Traceback" in failed.err) == (1, 1, False)
    assert len(runs()) == 1


@pytest.mark.parametrize("words", [["sparsifier=fp16"], ["sparsifier=dense"]])
def test_a_grid_is_the_same_by_m_and_by_a_study(words: list[str]) -> None:
    names = listed(study("both.yaml", [*WORDS, *words], {"density": [0.01, 0.1]}))
    assert len(names) == 1
    train("-m", *WORDS, *words, "density=0.01,0.1")
    assert runs() == set(names)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (None, "model.num_classes=null"),
        (7, "model.num_classes=7"),
        ({"name": "topk"}, "sparsifier.selector={name: topk}"),
        ({"name": "micro", "rule": "repaired"}, "sparsifier.selector={name: micro, rule: repaired}"),
        ({"rule": "repaired"}, "sparsifier.selector.rule=repaired"),
        (True, "compile=true"),
        (1e-5, "lr=1e-5"),
        ("[1, 2]", "lr_milestones=[1, 2]"),
    ],
)
def test_a_value_of_a_grid_is_what_the_command_line_reads(value: object, word: str) -> None:
    key = word.partition("=")[0].removesuffix(".rule")
    assert listed(study("grid.yaml", WORDS, {key: [value]})) == listed(study("word.yaml", [*WORDS, word], {}))
