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
    "neumf_movielens100k",
}
RECIPES = sorted({path.stem for path in (CONF / "experiment").glob("*.yaml")} - STUDIES)
SCALES = ("paper", "small")
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

# What the papers, or the public code of their authors, state. Of two equal words the later one counts.
FAMILY = "optimizer.name=sgd optimizer.nesterov=published optimizer.decay_of=published optimizer.lr_at=update"
MICRO_CNN = (
    f"{FAMILY} optimizer.momentum=0.9 optimizer.weight_decay=0.0001 optimizer.clip=null world_size=16 batch_size=32 "
    "epochs=200 density=0.001 lr=0.4 lr_warmup_epochs=5 lr_warmup_start=0.25 lr_milestones=[150] lr_decay=0.1"
)
MICRO_LSTM = (
    f"{FAMILY} optimizer.momentum=0 optimizer.weight_decay=0 optimizer.clip=0.4 optimizer.clip_at=gradient "
    "world_size=16 batch_size=32 epochs=90 density=0.001 lr=20 lr_warmup_epochs=5 lr_warmup_start=0.125 lr_decay=0.1 "
    "lr_milestones=[60,80] dataset.sequence_length=30 model.settings.hidden=650 model.settings.num_layers=3 "
    "model.settings.dropout=0.4 model.settings.tied=true"
)
MICRO_NEUMF = (
    "optimizer.name=adam optimizer.betas=[0.25,0.5] world_size=4 batch_size=262140 epochs=30 density=0.001 lr=0.0045 "
    "lr_warmup_epochs=0 lr_milestones=[] dataset.negatives=4 dataset.settings.num_negatives=100 "
    "model.settings.factors=64 model.settings.layers=[256,256,128,64] model.settings.dropout=0.5"
)
EXDYNA_CNN = f"{MICRO_CNN} world_size=8 lr=0.2 lr_warmup_start=0.5"
SAGE_CNN = f"{MICRO_CNN} world_size=4 batch_size=256 lr=0.8 lr_warmup_start=0.125"
GAUSSIANK = "world_size=16 density=0.001 density_warmup.start=0.015625 density_warmup.stages=2"
DGC = "density=0.001 lr_shape=cosine density_warmup.start=0.25 density_warmup.stages=4"
ROTATED = "dataset.augment=crop_flip_rotate"
PUBLISHED = {
    "micro_resnet18_cifar10": f"{MICRO_CNN} dataset.augment=crop_flip",
    "micro_resnet152_cifar10": f"{MICRO_CNN} dataset.augment=crop_flip model.settings.stem=cifar",
    "micro_vgg19_bn_cifar10": MICRO_CNN,
    "micro_senet18_cifar10": MICRO_CNN,
    "micro_googlenet_cifar10": MICRO_CNN,
    "micro_resnet18_cifar100": f"{MICRO_CNN} {ROTATED}",
    "micro_seresnet18_cifar100": f"{MICRO_CNN} {ROTATED}",
    "micro_googlenet_cifar100": f"{MICRO_CNN} {ROTATED}",
    "micro_lstm_wikitext2": MICRO_LSTM,
    "micro_neumf_movielens20m": MICRO_NEUMF,
    "exdyna_resnet152_cifar10": f"{EXDYNA_CNN} model.settings.stem=cifar",
    "exdyna_inception_v4_cifar100": f"{EXDYNA_CNN} {ROTATED}",
    "exdyna_lstm_wikitext2": f"{MICRO_LSTM} world_size=8 lr=10 lr_warmup_start=0.25",
    "exdyna_neumf_movielens20m": MICRO_NEUMF,
    "deft_resnet18_cifar10": f"{MICRO_CNN} density=0.01 lr=0.05 lr_warmup_epochs=0",
    "deft_lstm_wikitext2": f"{MICRO_LSTM} lr=15 lr_warmup_epochs=0 lr_milestones=[45,80]",
    "deft_neumf_movielens20m": f"{MICRO_NEUMF} world_size=16 batch_size=65535 density=0.1",
    "sage_resnet18_cifar10": SAGE_CNN,
    "sage_resnet18_cifar100": f"{SAGE_CNN} {ROTATED}",
    "sage_lstm_wikitext2": f"{MICRO_LSTM} world_size=4 batch_size=128 lr=10",
    "sage_neumf_movielens20m": f"{MICRO_NEUMF} density=0.095",
    "gaussiank_resnet20_cifar10": f"{GAUSSIANK} optimizer.momentum=0.9 batch_size=32 epochs=141 lr=0.1",
    "gaussiank_vgg16_bn_cifar10": f"{GAUSSIANK} optimizer.momentum=0.9 batch_size=128 lr=0.1",
    "gaussiank_resnet50_imagenet": f"{GAUSSIANK} optimizer.momentum=0.9 batch_size=32 epochs=70 lr=0.01",
    "gaussiank_lstm_ptb": f"{GAUSSIANK} batch_size=20 lr=22",
    "sidco_resnet20_cifar10": "density=0.001 optimizer.momentum=0.9 batch_size=32 epochs=141 lr=0.1",
    "sidco_vgg16_bn_cifar10": "density=0.001 optimizer.momentum=0.9 batch_size=128 lr=0.1",
    "sidco_resnet50_imagenet": "density=0.001 optimizer.momentum=0.9 batch_size=32 epochs=70 lr=0.01",
    "sidco_lstm_ptb": "density=0.001 batch_size=20 lr=22",
    "gtopk_resnet20_cifar10": "world_size=32 density_warmup.start=0.004 density_warmup.stages=1",
    "oktopk_vgg16_bn_cifar10": "world_size=16 batch_size=16 lr=0.1 epochs=161 density=0.02 density_warmup.start=1 "
    "density_warmup.steps=512 density_warmup.stages=1",
    "oktopk_bert_base_wikitext2": "world_size=32 batch_size=8 lr=0.0002 density=0.01 dataset.sequence_length=128",
    "dgc_resnet20_cifar10": f"{DGC} lr=0.1 epochs=200",
    "dgc_resnet50_imagenet": f"{DGC} world_size=32 batch_size=32 lr=0.4 lr_warmup_epochs=5 epochs=90",
    "powersgd_resnet18_cifar10": f"{FAMILY} world_size=16 batch_size=128 epochs=300",
    "mgwfbp_resnet50_imagenet": "sparsifier.name=dense world_size=16 batch_size=32",
    "mgwfbp_googlenet_imagenet": "sparsifier.name=dense world_size=16 batch_size=64 model.settings.auxiliary=true",
}


@cache
def forms(name: str) -> dict[str, TrainConfig]:
    """Return a recipe at both scales."""
    return {scale: from_words(f"experiment={name}", f"scale={scale}") for scale in SCALES}


def from_words(*words: str) -> TrainConfig:
    config = compose_run(list(words))
    check_parts(config)
    return config


def value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_the_paper_s_scale_has_the_published_numbers(name: str) -> None:
    published = dict(word.split("=") for word in PUBLISHED[name].split())
    expected = {key: yaml.safe_load(number) for key, number in published.items()}
    assert {key: value(forms(name)["paper"], key) for key in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
def test_the_small_scale_is_another_one(name: str) -> None:
    paper, small = forms(name)["paper"], forms(name)["small"]
    assert (small.world_size, small.cluster.simulated) == (4, True)
    assert small.epochs <= 3 < paper.epochs
    assert small.batch_size <= paper.batch_size
    part_of_cifar = small.dataset.settings.get("num_train") == 8000
    assert part_of_cifar or small.dataset.name in ("digits", "manuals", "latent")  # which need no files


@pytest.mark.parametrize("dataset", SIZES)
def test_a_data_set_knows_the_settings_that_recipes_give_it(dataset: str, tmp_path: Path) -> None:
    chosen = [config.dataset for name in RECIPES for config in forms(name).values() if config.dataset.name == dataset]
    for settings in {str(config.settings): config.settings for config in chosen}.values():
        if dataset in ("digits", "manuals", "latent"):
            data.check(dataset, **settings)
            continue
        with pytest.raises(ValueError, match=str(tmp_path)):  # only the files are missing
            data.check(dataset, str(tmp_path), **settings)


def test_every_model_can_be_built() -> None:
    configs = [config for name in RECIPES for config in forms(name).values()]
    for config in {f"{config.model} {config.dataset.name}": config for config in configs}.values():
        with torch.device("meta"):
            build_model(config, SIZES[config.dataset.name])


@pytest.mark.parametrize("scale", SCALES)
def test_the_command_line_wins_over_both_scales(scale: str) -> None:
    words = ["epochs=7", "lr=0.3", "lr_milestones=[2]", "cluster.world_size=3", "dataset.settings.num_train=99"]
    config = from_words("experiment=micro_resnet18_cifar10", f"scale={scale}", *words)
    assert (config.epochs, config.lr, config.lr_milestones) == (7, 0.3, [2])
    assert (config.world_size, config.dataset.settings["num_train"]) == (3, 99)
