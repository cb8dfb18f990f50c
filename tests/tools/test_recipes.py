"""Every recipe of conf/experiment gives a run with the published numbers, and its small form one for a laptop."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import data
from experiments.config import CONF
from experiments.config.builders import build_model, check_parts
from experiments.config.compose import compose_run
from experiments.config.schema import TrainConfig

STUDIES = {  # studies of no paper have one form
    *("cifar10_long", "cifar10_small", "digits", "gpt_manuals", "gpt_wikitext103"),
    "shakespeare_char",
    "neumf_movielens100k",
}
RECIPES = sorted({path.stem for path in (CONF / "experiment").glob("*.yaml")} - STUDIES)
SMALL = sorted(path.stem for path in (CONF / "experiment/small").glob("*.yaml"))
WITHOUT_FILES = ("digits", "manuals", "latent")
IMAGES_32 = {"in_channels": 3, "image_size": 32}
SIZES = {
    "cifar10": {**IMAGES_32, "num_classes": 10},
    "cifar100": {**IMAGES_32, "num_classes": 100},
    "imagenet": {"in_channels": 3, "image_size": 224, "num_classes": 1000},
    "digits": {"in_channels": 1, "image_size": 8, "num_classes": 10},
    "wikitext2": {"num_words": 33_278, "num_characters": 123, "word_length": 22},
    "ptb": {"num_words": 10_000},
    "manuals": {"num_words": 2000},
    "movielens20m": {"num_users": 138_493, "num_items": 26_744},
    "latent": {"num_users": 600, "num_items": 400},
}

PUBLISHED = yaml.safe_load((Path(__file__).parent / "golden/recipes.yaml").read_text())


@cache
def recipe(name: str) -> TrainConfig:
    return compose_run([f"experiment={name}"])


def all_forms() -> list[TrainConfig]:
    return [recipe(name) for name in (*RECIPES, *(f"small/{name}" for name in SMALL))]


def value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_the_paper_s_scale_has_the_published_numbers(name: str) -> None:
    expected = PUBLISHED[name]
    assert {key: value(recipe(name), key) for key in expected} == expected


@pytest.mark.parametrize("name", SMALL)
def test_the_small_form_is_shorter(name: str) -> None:
    paper, small = recipe(name), recipe(f"small/{name}")
    assert (small.world_size, small.cluster.simulated) == (4, True)
    assert small.epochs <= 3 < paper.epochs
    assert small.dataset.settings.get("num_train") == 8000 or small.dataset.name in WITHOUT_FILES


@pytest.mark.parametrize("dataset", SIZES)
def test_a_data_set_knows_the_settings_that_recipes_give_it(dataset: str, tmp_path: Path) -> None:
    chosen = [config.dataset for config in all_forms() if config.dataset.name == dataset]
    for settings in {str(config.settings): config.settings for config in chosen}.values():
        if dataset in WITHOUT_FILES:
            data.check(dataset, **settings)
            continue
        with pytest.raises(ValueError, match=str(tmp_path)):  # only the files are missing
            data.check(dataset, str(tmp_path), **settings)


def test_every_model_and_method_can_be_built() -> None:
    configs = all_forms()
    for config in configs:
        check_parts(config)
    for config in {f"{config.model} {config.dataset.name}": config for config in configs}.values():
        with torch.device("meta"):
            build_model(config, SIZES[config.dataset.name])


@pytest.mark.parametrize("name", ["micro_resnet18_cifar10", "small/micro_resnet18_cifar10"])
def test_the_command_line_wins_over_a_recipe(name: str) -> None:
    words = ["epochs=7", "lr=0.3", "lr_milestones=[2]", "cluster.world_size=3", "dataset.settings.num_train=99"]
    config = compose_run([f"experiment={name}", *words])
    assert (config.epochs, config.lr, config.lr_milestones) == (7, 0.3, [2])
    assert (config.world_size, config.dataset.settings["num_train"]) == (3, 99)
