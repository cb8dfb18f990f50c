"""Every choice of every group, and every run of every study, composes, and as Hydra composes it."""

import itertools
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.config.builders import build_reducer, check_parts
from experiments.config.checks import check_settings
from experiments.config.compose import compose_run
from experiments.config.conf_files import choices_of, compose_layers
from experiments.config.descriptions import GROUPS
from experiments.config.identity import run_name
from experiments.config.paths import CONF
from experiments.config.schema import TrainConfig
from experiments.sweeps.study import jobs_of, parts_of, studies
from experiments.training.preflight import prepare_runs


def compose_one(*words: str) -> TrainConfig:
    (config,) = prepare_runs([list(words)])
    return config


def test_every_choice_of_every_group_composes() -> None:
    for sparsifier in (path.stem for path in (CONF / "sparsifier").glob("*.yaml")):
        config = compose_one(f"sparsifier={sparsifier}", "optimizer.momentum=0")  # which some methods hold themselves
        assert config.sparsifier.name == sparsifier
        build_reducer(config)
    for model in ("resnet8", "resnet18", "resnet20", "mlp"):
        assert compose_one(f"model={model}").model.name == model
    assert compose_one("cluster=simulated", "cluster.world_size=16").world_size == 16


@pytest.mark.parametrize("study", [part for study in studies() for part in parts_of(study)])
def test_every_study_composes_and_names_its_runs_apart(study: str) -> None:
    words = ["schedule.trace=trace.json", "schedule.link=link.json"] if "planned" in study else []
    seen: set[str] = set()
    new = [job for job in jobs_of(study, words) if not seen.issuperset(job) and not seen.update(job)]  # every word once
    configs = [compose_run(job) for job in new]
    for config in configs:
        check_parts(config)
    names = [run_name(config) for config in configs]
    repeated = [c for c, name in zip(configs, names, strict=True) if names.count(name) > 1]
    assert names
    assert all(config.sparsifier.is_dense for config in repeated)  # which is one run at any density


def composed_by_hydra(words: list[str]) -> dict[str, Any]:
    values = OmegaConf.to_container(compose("train", words), resolve=False)
    return plain_keys(values)


def plain_keys(value: Any) -> Any:
    """Return the value with keys as text, as both write them."""
    if isinstance(value, dict):
        return {str(key): plain_keys(inner) for key, inner in value.items()}
    return [plain_keys(inner) for inner in value] if isinstance(value, list) else value


def every_choice() -> list[dict[str, str]]:
    """Return choices with every file of conf/ in one of them; an experiment, which chooses for others, is alone."""
    groups = {group: choices_of(group) for group in GROUPS if group != "experiment"}
    rounds = itertools.zip_longest(*groups.values())
    chosen = [{group: name for group, name in zip(groups, names, strict=True) if name} for names in rounds]
    return chosen + [{"experiment": name} for name in choices_of("experiment")]


def test_files_are_composed_as_hydra_composes_them() -> None:
    chosen = every_choice()
    chosen.append({"experiment": "micro_resnet18_cifar10", "sparsifier": "dgc", "cluster": "local"})
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for choices in chosen:
            words = [f"{group}={choice}" for group, choice in choices.items()]
            assert plain_keys(compose_layers(choices)) == composed_by_hydra(words), words


@pytest.mark.parametrize(
    "words",
    [
        ("experiment=micro_resnet18_cifar10", "scale=small", "epochs=4", "sparsifier=dense"),
        ("experiment=gaussiank_lstm_ptb", "density_warmup.stages=1", "sparsifier.selector={name: topk}"),
        ("experiment=digits", "sparsifier.codec={name: int8, block: 64}", "lr_milestones=[1, 2.5]", "lr=1e-3"),
        ("cluster=slurm", "cluster.nnodes=3", "cluster.slurm.setup=['module load cuda']", "seed=7"),
        ("sparsifier=micro", "sparsifier.selector.rule=published", "output='a b'", "checkpoint={every_s: 5, keep: 1}"),
        ("model=lstm", "dataset=manuals", "model.settings.hidden=${batch_size}", "optimizer=adam", "tracking=wandb"),
    ],
)
def test_values_are_set_as_hydra_sets_them(words: tuple[str, ...]) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        expected = compose("train", list(words))
    merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), expected))
    check_settings(merged)
    assert compose_run(list(words)) == merged


@pytest.mark.parametrize("study", ["demo", "methods/digits", "equal_bytes/digits", "curves/cifar10"])
def test_the_runs_of_a_study_are_those_that_hydra_composes(study: str) -> None:
    jobs = jobs_of(study, [])
    for words in (jobs[0], jobs[-1]):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            expected = compose("train", words)
        merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), expected))
        check_settings(merged)
        assert compose_run(words) == merged
