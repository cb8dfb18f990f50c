"""A run's name follows what it computes, and stays when the schema gets a key or its output another place."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.config.compose import compose_run
from experiments.config.errors import UserError
from experiments.config.identity import complete_digests, identity, run_name
from experiments.config.keys import flat, to_yaml
from experiments.config.schema import TrainConfig
from experiments.runs.before_start import check_requests
from experiments.runs.run_folder import RunFolder, folder_of
from tests.finished_runs import finished
from tests.refusals import refused


def test_the_name_follows_content_and_not_place() -> None:
    name = run_name(compose_run(["seed=1"]))
    assert name == run_name(compose_run(["seed=1", "output=elsewhere", "save_weights=true"]))
    assert name != run_name(compose_run(["seed=1", "lr=0.019"]))
    assert name != run_name(compose_run(["seed=2"]))


def test_a_name_stays() -> None:
    """Folders of runs and published tables have these names: a new setting belongs into ADDED."""
    assert run_name(compose_run(["cluster=simulated"])) == "resnet8-digits-micro-d0.01-w4-s0-975fe21f"
    words = ["experiment=small/micro_lstm_wikitext2", "rounds.every=4"]
    assert run_name(compose_run(words)) == "lstm-manuals-micro-d0.01-w4-s0-0e172c3c"


FOUR = {
    "its own start": (["cluster.nproc_per_node=4"], None),
    "torchrun or srun": ([], 4),
    "two machines": (
        ["cluster=nodes", "cluster.nnodes=2", "cluster.nproc_per_node=2", "cluster.rdzv_endpoint=a:2999"],
        None,
    ),
    "another place": (["cluster.nproc_per_node=4", "cluster.num_threads=2", "tracking=wandb"], None),
}


@pytest.mark.parametrize(("words", "joined"), FOUR.values(), ids=FOUR)
def test_the_same_workers_are_one_run_wherever_they_are(words: list[str], joined: int | None) -> None:
    config, here = compose_run(words, joined_world_size=joined), compose_run(FOUR["its own start"][0])
    assert run_name(config) == run_name(here)
    assert identity(flat(dataclasses.asdict(config))) == identity(flat(dataclasses.asdict(here)))


def test_number_kind_and_device_of_workers_tell_runs_apart() -> None:
    real, simulated = ["cluster.nproc_per_node=4"], ["cluster=simulated", "cluster.world_size=4"]
    on = {device: run_name(compose_run([*real, f"cluster.device={device}"])) for device in ("auto", "cpu", "cuda")}
    assert on["auto"] in (on["cpu"], on["cuda"])
    others = [run_name(compose_run([*words, "cluster.device=cpu"])) for words in ([], simulated)]
    assert len({on["cpu"], on["cuda"], *others}) == 4


def test_files_that_settings_name_are_identified_by_content_not_path(tmp_path: Path) -> None:
    def named(place: str, start: str, trace: str) -> str:
        checkpoint = tmp_path / place / "run/checkpoints/step-000000003/CHECKPOINT.json"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.write_text(json.dumps({"step": 3, "ranks": [start], "time": place}))
        (tmp_path / place / "trace.json").write_text(trace)
        words = [f"start_from={tmp_path / place / 'run'}", f"schedule.trace={tmp_path / place / 'trace.json'}"]
        return run_name(compose_run(words))

    assert named("a", "1", "x") == named("b", "1", "x")
    assert len({named("c", "1", "x"), named("d", "2", "x"), named("e", "1", "y")}) == 3
    (tmp_path / "a/trace.json").write_text("changed")
    config = compose_run([f"schedule.trace={tmp_path / 'a/trace.json'}"])
    assert not [key for key in identity(flat(dataclasses.asdict(config))) if key.startswith("digests")]
    config.digests["schedule.trace"] = "of another"
    refused(lambda: complete_digests(config), "schedule.trace=", "has other content", error=UserError)


def done(config: TrainConfig) -> RunFolder:
    """Write the folder of a finished run."""
    folder = folder_of(config)
    folder.path.mkdir(parents=True)
    folder.config_path.write_text(to_yaml(config))
    return finished(folder)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("save_weights=true", ("its weights were not saved", "experiments.sweep rerun")),
        ("measure_residual_every=5", ("its residual was measured in every 10. step",)),
        ("measure_test_every=5", ("its loss on the test set within epochs was measured never",)),
        ("tracking=wandb", ("was not mirrored", "experiments.track", "--mode offline")),
    ],
)
def test_a_finished_run_is_refused_what_it_has_not(word: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    common = [f"output={tmp_path}", "measure_residual_every=10"]
    done(compose_run(common))
    configs = [compose_run([*common, word]), compose_run([*common, "seed=5"])]
    refused(lambda: check_requests(configs), *parts, error=UserError)


def test_runs_with_and_without_a_newer_key_are_one_experiment() -> None:
    older = {"lr": 1, "model.settings.width": 4, "output": "here"}
    assert identity(older) == identity({**older, "optimizer.clip_norm": "rank", "output": "there"})
    assert identity(older) != identity({**older, "optimizer.clip_norm": "global"})
