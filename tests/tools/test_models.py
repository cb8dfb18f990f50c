"""What every model promises: its size, its shapes, its seed, the architecture of its paper, and its errors."""

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from tests.refusals import refused


def image(image_size: int = 224, num_classes: int = 10, in_channels: int = 3) -> dict[str, int]:
    return {"in_channels": in_channels, "num_classes": num_classes, "image_size": image_size}


PTB = {"num_words": 10_000, "num_characters": 51, "word_length": 21}
ROPE = {"hidden": 128, "num_layers": 4, "num_heads": 4, "positions": "rope"}
COUNTS = [
    ("mlp", image(8, in_channels=1), {}, 8_970),
    ("resnet8", image(in_channels=1), {}, 75_002),
    ("resnet20", image(), {}, 269_722),
    ("resnet110", image(), {}, 1_727_962),
    ("resnet18", image(), {}, 11_173_962),
    ("resnet18", image(num_classes=1000), {"stem": "imagenet"}, 11_689_512),
    ("resnet34", image(num_classes=1000), {"stem": "imagenet"}, 21_797_672),
    ("resnet50", image(num_classes=1000), {}, 25_557_032),
    ("resnet152", image(num_classes=1000), {}, 60_192_808),
    ("resnet152", image(), {"stem": "cifar"}, 58_156_618),
    ("vgg16_bn", image(), {}, 14_728_266),
    ("vgg19_bn", image(), {}, 20_040_522),
    ("googlenet", image(num_classes=1000), {}, 6_998_552),
    ("googlenet", image(num_classes=1000), {"auxiliary": True}, 13_378_280),
    ("googlenet_cifar", image(), {}, 6_166_250),
    ("senet18", image(), {}, 11_260_354),
    ("seresnet18", image(num_classes=100), {}, 11_436_256),
    ("seresnet18", image(num_classes=100), {"last_width": 512}, 11_314_012),
    ("inception_v4", image(num_classes=1000), {"stem": "cifar"}, 42_679_816),
    ("lstm", {"num_words": 28_869}, {}, 28_949_319),
    ("lstm", {"num_words": 33_278}, {}, 31_819_578),
    ("lstm", {"num_words": 33_278}, {"tied": False}, 31_819_578 + 33_278 * 650),
    ("gpt", {"num_words": 50_257}, {}, 124_439_808),
    ("gpt", {"num_words": 256}, ROPE, 826_112),
    ("gpt", {"num_words": 256}, ROPE | {"hidden": 384, "num_layers": 6, "num_heads": 6}, 10_745_856),
    ("gpt", {"num_words": 256}, ROPE | {"hidden": 512, "num_layers": 10, "num_heads": 8}, 31_655_936),
    ("cnn_lstm", PTB, {}, 5_312_515),
    ("cnn_lstm", PTB, {"size": "large"}, 19_373_165),
    ("neumf", {"num_users": 138_493, "num_items": 26_744}, {}, 31_832_577),
    ("bert_base", {"num_words": 30_522}, {"max_length": 512}, 109_514_298),
    ("bert_base", {"num_words": 30_522}, {}, 109_219_386),
]
LIBRARIES = {"inception_v4": "timm", "vgg16_bn": "torchvision", "vgg19_bn": "torchvision", "bert_base": "transformers"}
SMALL: dict[str, dict[str, Any]] = {
    "lstm": {"hidden": 8, "num_layers": 2},
    "cnn_lstm": {"size": "tiny"},
    "gpt": {"hidden": 8, "num_layers": 2, "num_heads": 2, "max_length": 6},
    "neumf": {"factors": 4, "layers": [8, 6]},
    "bert_base": {"hidden": 8, "num_layers": 2, "num_heads": 2, "intermediate": 16, "max_length": 7},
    "inception_v4": {"stem": "cifar"},
}
SIZES = {"num_words": 11, "num_characters": 6, "word_length": 4, "num_users": 5, "num_items": 7}
SEQUENCES = ["lstm", "cnn_lstm", "gpt", "bert_base", "neumf"]
LANGUAGE = ["lstm", "cnn_lstm", "gpt"]
WORDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))


def build(name: str, sizes: dict[str, int], **settings: Any) -> nn.Module:
    if name in LIBRARIES and importlib.util.find_spec(LIBRARIES[name]) is None:
        pytest.skip(f"{name} needs {LIBRARIES[name]}, which is not installed")
    return models.build(name, sizes=sizes, **settings)


def small(name: str, *, seed: int = 0, **settings: Any) -> nn.Module:
    """A model of words or interactions in float64, whose words all have a spelling."""
    torch.manual_seed(seed)
    model = build(name, SIZES, **(SMALL[name] | settings))
    if name == "cnn_lstm":
        model.get_buffer("spelling").copy_(torch.randint(1, 6, (11, 4)))
    return model.double()


def logits(name: str, model: nn.Module, words: Tensor = WORDS) -> Tensor:
    if name == "neumf":
        return model(torch.tensor([0, 1, 4, 1]), torch.tensor([6, 6, 0, 3]))
    return model(words) if name == "bert_base" else model(words, None)[0]


# All models


@pytest.mark.parametrize(("name", "sizes", "settings", "count"), COUNTS)
def test_the_number_of_parameters_is_the_published_one(
    name: str, sizes: dict[str, int], settings: dict[str, Any], count: int
) -> None:
    with torch.device("meta"):
        model = build(name, sizes, **settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


SIDES = [(name, 32) for name in models.names() if models.kind_of(name) == "images"]
SIDES += [("resnet18", 8), ("resnet50", 64), ("vgg19_bn", 224), ("googlenet", 8), ("inception_v4", 75)]


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_a_model_of_images_gives_logits_and_a_gradient_for_every_parameter(name: str, side: int) -> None:
    with torch.device("meta"):
        model = build(name, image(side, 7, 1), **SMALL.get(name, {}))
        out = model(torch.empty(2, 1, side, side))
        assert out.shape == (2, 7)
        out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_parameter_of_a_model_of_sequences_gets_a_dense_gradient(name: str) -> None:
    model = small(name)
    out = logits(name, model)
    assert out.shape == ((4,) if name == "neumf" else (3, 6, 11))
    out.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.layout == torch.strided and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", SEQUENCES)
def test_dropout_follows_the_seed_and_is_off_in_evaluation(name: str) -> None:
    model = small(name, dropout=0.5)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return logits(name, model)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    model.eval()
    assert torch.equal(drawn(1), drawn(2))


ALL = SIZES | image(31)
WRONG: list[tuple[str, dict[str, int], dict[str, Any], tuple[Any, ...]]] = [
    ("resnet19", ALL, {}, ("'resnet19'; did you mean 'resnet",)),
    ("transformer", ALL, {}, ("transformer",)),
    ("mlp", ALL, {"image_size": 8}, ("allows only hidden", "image_size")),
    ("resnet20", ALL, {"depth": 3}, ("no settings", "depth")),
    ("resnet50", ALL, {"stem": "tiny"}, ("stem", "tiny")),
    ("inception_v4", ALL, {"stem": "tiny"}, ("stem", "tiny")),
    ("inception_v4", ALL, {"stem": "imagenet"}, (75, 31)),
    ("vgg16_bn", ALL, {}, (32, 31)),
    ("seresnet18", ALL, {"last_width": 8}, ("last_width", 16, 8)),
    ("googlenet", ALL, {"auxiliary": "yes"}, ("auxiliary", "yes")),
    ("mlp", ALL, {"hidden": 0}, ("hidden", 0)),
    ("lstm", ALL, {"dropout": 1.0}, ("dropout", 1.0)),
    ("lstm", ALL, {"tied": 1}, ("tied", 1)),
    ("cnn_lstm", ALL, {"size": "huge"}, ("size", "huge")),
    ("neumf", ALL, {"layers": []}, ("layers", [])),
    ("neumf", ALL, {"layers": [8, 0]}, ("layers[1]", 0)),
    ("neumf", ALL, {"layers": [7, 4]}, ("layers[0] must be even", 7)),
    ("bert_base", ALL, {"num_heads": 3}, ("hidden", "8 and 3")),
    ("gpt", ALL, {"hidden": 10, "num_heads": 2}, ("hidden", "10 and 2")),
    ("gpt", ALL, {"positions": "none"}, ("positions", "none")),
    ("mlp", image(8, 0), {}, ("num_classes", 0)),
    ("resnet8", {"num_words": 9}, {}, ("for images and needs in_channels", "num_words")),
    ("lstm", image(), {}, ("for text and needs num_words", "in_channels")),
    ("bert_base", image(), {}, ("for masked_text and needs num_words", "in_channels")),
    ("neumf", image(), {}, ("for interactions and needs num_users", "in_channels")),
]


@pytest.mark.parametrize(("name", "sizes", "settings", "parts"), WRONG)
def test_a_wrong_setting_or_size_is_refused(
    name: str, sizes: dict[str, int], settings: dict[str, Any], parts: tuple[Any, ...]
) -> None:
    own = SMALL.get(name, {}) if sizes == ALL else {}
    refused(lambda: models.build(name, sizes=sizes, **own | settings), *parts)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (
        ("vgg19_bn", "torchvision.models.vgg"),
        ("inception_v4", "timm"),
        ("bert_base", "transformers"),
    ):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
        refused(lambda name=name: models.build(name, sizes=SIZES | image(75)), f"needs {LIBRARIES[name]}: pip install")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "given", "parts"),
    [
        ("mlp", (torch.zeros(1, 3, 32, 32),), ("(3, 8, 8), got (3, 32, 32)",)),
        ("gpt", (torch.zeros(3, 7).long(), None), ("at most 6 words in a row", 7)),
        ("bert_base", (torch.zeros(3, 8).long(),), ("at most 7 words in a row", "8: raise max_length")),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name: str, given: tuple[Any, ...], parts: tuple[Any, ...]) -> None:
    model = small(name) if name in SEQUENCES else build(name, image(8))
    refused(lambda: model(*given), *parts)


# Models of images


def test_auxiliary_heads_count_in_training_only() -> None:
    with torch.device("meta"):
        model = build("googlenet", image(32, 5), auxiliary=True)
        calls: list[str] = []
        for place, head in model.get_submodule("auxiliary").named_children():
            head.register_forward_hook(lambda *_, place=place: calls.append(place))
        model(torch.empty(2, 3, 32, 32)).sum().backward()
        model.eval()(torch.empty(2, 3, 32, 32))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert calls == ["0", "3"]


def test_option_a_shortcut_subsamples_and_appends_zero_channels() -> None:
    from models.resnet import PadShortcut

    inputs = torch.arange(2 * 2 * 4 * 4, dtype=torch.float32).view(2, 2, 4, 4)
    outputs = PadShortcut(2, 6, 2)(inputs)
    assert torch.equal(outputs[:, :2], inputs[:, :, ::2, ::2])
    assert torch.equal(outputs[:, 2:], torch.zeros(2, 4, 2, 2))
