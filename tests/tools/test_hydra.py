"""What a user of Hydra types at experiments.train works as its documentation says; a grid is one by -m and sweep."""

import json
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from tests.in_process import Called, call
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
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


def runs() -> set[str]:
    return {path.parent.name for path in Path("runs").glob("*/DONE")}


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=small/micro_lstm_wikitext2", "model=gpt_small", *SHORT],
        ["experiment=cifar10_small", *WORDS, "sparsifier=fp16", "lr_milestones=[2]", "seed=3"],
    ],
)
def test_what_cfg_prints_is_what_runs(words: list[str]) -> None:
    printed = yaml.safe_load(train(*words, "--cfg", "job", "--resolve").out)
    train(*words)
    (path,) = Path("runs").glob("*/config.yaml")
    ran = yaml.safe_load(path.read_text())
    for config in (printed, ran):
        del config["cluster"]["world_size"], config["cluster"]["device"], config["density"]  # filled in where it runs
    assert printed == ran


def test_train_and_sweep_refuse_equally_what_a_finished_run_lacks() -> None:
    train(*WORDS)
    Path("study.yaml").write_text(yaml.safe_dump({"overrides": WORDS, "grid": {"seed": [0]}}))
    for command in (["train", *WORDS], ["sweep", "study.yaml"]):
        refused([*command, "save_weights=true"], "save_weights=true", "sweep rerun")


def shown(key: str, *words: str) -> object:
    """Return a part of the configuration that ``--cfg job`` prints."""
    printed: dict[str, object] = yaml.safe_load(train("--cfg", "job", "--resolve", *words).out)
    for name in key.split("."):
        printed = printed[name]  # type: ignore[assignment]
    return printed


def test_keys_of_mappings_are_added_set_and_removed() -> None:
    assert shown("model.settings", "model=mlp", "+model.settings.depth=2") == {"hidden": 64, "depth": 2}
    assert shown("model.settings", "model=mlp", "++model.settings.hidden=8") == {"hidden": 8}
    assert shown("model.settings", "model=mlp", "~model.settings.hidden") == {}
    assert shown("schedule.settings", "+schedule@schedule.settings=single")["name"] == "single"  # type: ignore[index]


def test_configurations_come_from_folders_of_the_user() -> None:
    Path("mine/model/deep").mkdir(parents=True)
    Path("mine/model/tiny.yaml").write_text("name: mlp\nsettings: {hidden: 5}\n")
    Path("mine/model/deep/one.yaml").write_text("# @package model\nname: mlp\nsettings: {hidden: 6}\n")
    Path("mine/nine.yaml").write_text("defaults: [train, _self_]\nseed: 9\n")
    assert shown("model.settings", "--config-dir", "mine", "model=tiny") == {"hidden": 5}
    searched = f"hydra.searchpath=[file://{Path('mine').absolute()}]"
    assert shown("model.settings", searched, "model=deep/one") == {"hidden": 6}
    assert shown("seed", "--config-dir", "mine", "--config-name", "nine") == 9
    train(*WORDS, "--config-dir", "mine", "-m", "model=glob(ti*)")
    assert len(runs()) == 1


def test_resolvers_are_hydras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "there")
    assert shown("output", "output=${oc.env:PLACE}") == "there"
    assert str(shown("output", "output=runs-${now:%Y}")).startswith("runs-2")
    train(*WORDS[:-1], "output=${hydra:runtime.cwd}/runs")
    assert len(runs()) == 1


def test_all_runs_are_checked_before_the_first_starts_and_after_a_failed_one_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused(["train", "-m", *WORDS, "lr=0.1,-1"], "lr", -1)
    assert runs() == set()
    failed = call(["train", "-m", *WORDS, "lr=1e30,0.1", "epochs=4"])
    assert (failed.code, failed.err.count("error:"), "Traceback" in failed.err, len(runs())) == (1, 1, False, 1)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    failed = call(["train", "densty=1"])
    assert (failed.code, "Traceback" in failed.err) == (2, True)
    assert failed.err.splitlines()[-1].startswith("error: 'densty' is not a key")


def test_options_stand_before_and_after_words() -> None:
    assert "model/mlp" in train("model=mlp", "--info").out
    assert "model/gpt_small" in train("model=gpt_small", "--info", "defaults", "experiment=micro_lstm_wikitext2").out
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


def test_a_run_that_is_finished_with_other_epochs_alone_is_named() -> None:
    first, again, longer, other = (
        train(*WORDS, *words).err for words in ([], [], ["epochs=2"], ["epochs=3", "lr=0.01"])
    )
    assert "epochs=1" in next(line for line in longer.splitlines() if line.startswith("note: "))
    assert not any("epochs=" in text for text in (first, again, other))
    assert len(runs()) == 3


def test_hydra_writes_its_files_where_requested() -> None:
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
def test_a_sweeper_that_has_no_result_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def best(self: Ends, arguments: Sequence[str]) -> None:  # like Optuna after all trials diverged
        raise ValueError("No trials are completed yet.")

    best = types.FunctionType(best.__code__, {"__name__": "hydra_plugins.ends", "__builtins__": __builtins__})
    monkeypatch.setattr(Ends, "sweep", best)
    called = call(["train", "-m", *WORDS, "hydra/sweeper=ends", "lr=interval(0.1,0.2)"])
    assert (called.code, len(called.err.splitlines())) == (1, 1), called
    assert "No trials are completed" in called.err


@pytest.mark.usefixtures("_other_sweeper")
def test_a_sweeper_chooses_the_runs_and_is_given_what_each_measured() -> None:
    for _ in ("run", "already done"):
        train("-m", *WORDS, "hydra/sweeper=ends", "lr=interval(0.1,0.2)")
        rows = [json.loads(path.read_text().splitlines()[-1]) for path in Path("runs").glob("*/epochs.jsonl")]
        assert sorted(map(float, Ends.returned)) == sorted(row["accuracy"] for row in rows)  # type: ignore[arg-type]
    assert len(runs()) == 2
