"""Every choice of every group, and every run of every study, composes, and as Hydra composes it."""

from itertools import zip_longest

import pytest
from hydra import compose
from omegaconf import OmegaConf

from experiments.config.builders import check_parts
from experiments.config.compose import NAME, compose_run, compose_runs, composed, hydra_of_conf
from experiments.config.conf_files import choices_of
from experiments.config.identity import run_name
from experiments.config.schema import GROUPS
from experiments.sweeps.study import jobs_of, parts_of, studies
from tests.products import TIER

ELSEWHERE = ("sparsifier", "experiment")  # below


def test_every_choice_of_every_group_composes() -> None:
    needs = {"nodes": ["cluster.nnodes=2", "cluster.rdzv_endpoint='a:1'"], "slurm": ["cluster.nnodes=2"]}
    groups = [[f"{group}={choice}" for choice in choices_of(group)] for group in GROUPS if group not in ELSEWHERE]
    for words in zip_longest(*groups):  # one of each group at a time
        chosen = [word for word in words if word]
        assert compose_run([*chosen, *(more for word in chosen for more in needs.get(word.partition("=")[2], []))])


def words_of(job: tuple[str, ...]) -> set[tuple[str, str]]:
    recipe = next((word for word in job if word.startswith("experiment=")), "")
    return {(recipe if TIER == "all" else "", word) for word in job}


COMPOSED: set[tuple[str, str]] = set()  # words of studies, in the last tier each with every recipe beside it


@pytest.mark.parametrize("study", [part for study in studies() for part in parts_of(study)])
def test_every_study_composes_and_names_its_runs_apart(study: str) -> None:
    words = ["schedule.trace=trace.json", "schedule.link=link.json"] if "planned" in study else []
    jobs = {job: words_of(job) for job in map(tuple, jobs_of(study, words))}
    new = [job for job, found in jobs.items() if not COMPOSED.issuperset(found) and not COMPOSED.update(found)]
    configs = compose_runs(new)
    for config in configs:
        check_parts(config)
    names = [run_name(config) for config in configs]
    repeated = [c for c, name in zip(configs, names, strict=True) if names.count(name) > 1]
    assert jobs
    assert all(config.sparsifier.is_dense for config in repeated)  # dense is one run at all densities


@pytest.mark.parametrize(
    "words",
    [
        ("experiment=small/micro_resnet18_cifar10", "epochs=4", "sparsifier=dense"),
        ("experiment=gaussiank_lstm_ptb", "density_warmup.stages=1", "sparsifier.selector={name: topk}"),
        ("experiment=digits", "sparsifier.codec={name: int8, block: 64}", "lr_milestones=[1, 2.5]", "lr=1e-3"),
        ("cluster=slurm", "cluster.nnodes=3", "cluster.slurm.setup=['module load cuda']", "seed=7"),
        ("sparsifier=micro", "sparsifier.selector.rule=published", "output='a b'", "checkpoint={every_s: 5, keep: 1}"),
        ("model=lstm", "dataset=manuals", "model.settings.hidden=${batch_size}", "optimizer=adam", "tracking=wandb"),
        (
            "lr=0.1",
            "lr=0.2",
            "sparsifier=topk",
            "+sparsifier.selector={name: topk}",
            "~model.settings.hidden",
            "model=mlp",
        ),
    ],
)
def test_what_is_composed_from_the_cache_is_what_hydra_composes(words: tuple[str, ...]) -> None:
    with hydra_of_conf():
        first, again, by_hydra = composed(words), composed(words), compose(NAME, list(words))
    assert first == again == by_hydra
    assert OmegaConf.to_yaml(first) == OmegaConf.to_yaml(by_hydra)


@pytest.mark.parametrize("recipe", choices_of("experiment"))
def test_a_typed_model_and_data_set_override_a_recipe(recipe: str) -> None:
    typed, alone = compose_runs(
        [[*words, "model=mlp", "dataset=synthetic"] for words in ([f"experiment={recipe}"], [])]
    )
    assert (typed.model, typed.dataset) == (alone.model, alone.dataset)
