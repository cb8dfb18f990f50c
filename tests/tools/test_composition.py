"""Every choice of every group, and every run of every study, composes."""

import pytest

from experiments.config.builders import build_reducer, check_parts
from experiments.config.compose import compose_run
from experiments.config.identity import run_name
from experiments.config.repository import CONF
from experiments.config.schema import TrainConfig
from experiments.sweep import jobs, studies
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


@pytest.mark.parametrize("study", studies())
def test_every_study_composes_and_names_its_runs_apart(study: str) -> None:
    words = ["schedule.trace=trace.json", "schedule.link=link.json"] if "planned" in study else []
    seen: set[str] = set()
    new = [job for job in jobs(study, words) if not seen.issuperset(job) and not seen.update(job)]  # every word once
    configs = [compose_run(job) for job in new]
    for config in configs:
        check_parts(config)
    names = [run_name(config) for config in configs]
    repeated = [c for c, name in zip(configs, names, strict=True) if names.count(name) > 1]
    assert names
    assert all(config.sparsifier.is_dense for config in repeated)  # which is one run at any density
