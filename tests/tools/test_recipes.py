"""Every recipe of conf/experiment gives a run at both scales, with the published numbers at the paper's."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import data
from experiments.config.builders import build_model, check_parts
from experiments.config.compose import compose_run
from experiments.config.paths import CONF
from experiments.config.schema import TrainConfig

STUDIES = {  # of no paper: they have one form
    *("cifar10_long", "cifar10_resnet20", "cifar10_small", "digits", "gpt_manuals", "gpt_wikitext103"),
    "shakespeare_char",
    "neumf_movielens100k",
}
RECIPES = sorted({path.stem for path in (CONF / "experiment").glob("*.yaml")} - STUDIES)
SCALES = ("paper", "small")
WITHOUT_FILES = ("digits", "manuals", "latent")
IMAGES_32 = {"in_channels": 3, "image_size": 32}
SIZES = {
    "cifar10": {**IMAGES_32, "num_classes": 10},
    "cifar100": {**IMAGES_32, "num_classes": 100},
    "imagenet": {"in_channels": 3, "image_size": 224, "num_classes": 1000},
    "digits": {"in_channels": 1, "image_size": 8, "num_classes": 10},
    "wikitext2": {"num_words": 33_278},
    "ptb": {"num_words": 10_000},
    "manuals": {"num_words": 2000},
    "movielens20m": {"num_users": 138_493, "num_items": 26_744},
    "latent": {"num_users": 600, "num_items": 400},
}

PUBLISHED = yaml.safe_load((Path(__file__).parent / "golden/recipes.yaml").read_text())


@cache
def forms(name: str) -> dict[str, TrainConfig]:
    """Return a recipe at both scales."""
    return {scale: compose_run([f"experiment={name}", f"scale={scale}"]) for scale in SCALES}


def value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_the_paper_s_scale_has_the_published_numbers(name: str) -> None:
    expected = PUBLISHED[name]
    assert {key: value(forms(name)["paper"], key) for key in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
def test_the_small_scale_is_another_one(name: str) -> None:
    paper, small = forms(name)["paper"], forms(name)["small"]
    assert (small.world_size, small.cluster.simulated) == (4, True)
    assert small.epochs <= 3 < paper.epochs
    assert small.dataset.settings.get("num_train") == 8000 or small.dataset.name in WITHOUT_FILES


@pytest.mark.parametrize("dataset", SIZES)
def test_a_data_set_knows_the_settings_that_recipes_give_it(dataset: str, tmp_path: Path) -> None:
    chosen = [config.dataset for name in RECIPES for config in forms(name).values() if config.dataset.name == dataset]
    for settings in {str(config.settings): config.settings for config in chosen}.values():
        if dataset in WITHOUT_FILES:
            data.check(dataset, **settings)
            continue
        with pytest.raises(ValueError, match=str(tmp_path)):  # only the files are missing
            data.check(dataset, str(tmp_path), **settings)


def test_every_model_and_method_can_be_built() -> None:
    configs = [config for name in RECIPES for config in forms(name).values()]
    for config in configs:
        check_parts(config)
    for config in {f"{config.model} {config.dataset.name}": config for config in configs}.values():
        with torch.device("meta"):
            build_model(config, SIZES[config.dataset.name])


@pytest.mark.parametrize("scale", SCALES)
def test_the_command_line_wins_over_both_scales(scale: str) -> None:
    words = ["epochs=7", "lr=0.3", "lr_milestones=[2]", "cluster.world_size=3", "dataset.settings.num_train=99"]
    config = compose_run(["experiment=micro_resnet18_cifar10", f"scale={scale}", *words])
    assert (config.epochs, config.lr, config.lr_milestones) == (7, 0.3, [2])
    assert (config.world_size, config.dataset.settings["num_train"]) == (3, 99)
