"""What every model promises: its size, its shapes, its seed and its errors."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

import models

COUNTS = [
    ("resnet8", 1, 10, {}, 75_002),
    ("resnet20", 3, 10, {}, 269_722),
    ("resnet56", 3, 10, {}, 853_018),
    ("resnet110", 3, 10, {}, 1_727_962),
    ("resnet18", 3, 10, {}, 11_173_962),
    ("resnet18", 3, 100, {}, 11_220_132),
    ("resnet18", 3, 1000, {"stem": "imagenet"}, 11_689_512),
    ("resnet34", 3, 10, {}, 21_282_122),
    ("resnet34", 3, 1000, {"stem": "imagenet"}, 21_797_672),
    ("resnet50", 3, 1000, {}, 25_557_032),
    ("resnet152", 3, 1000, {}, 60_192_808),
    ("resnet152", 3, 10, {"stem": "cifar"}, 58_156_618),
    ("vgg16_bn", 3, 10, {}, 14_728_266),
    ("vgg19_bn", 3, 10, {}, 20_040_522),
    ("googlenet", 3, 1000, {}, 6_998_552),
    ("googlenet", 3, 1000, {"auxiliary": True}, 13_378_280),
    ("googlenet_cifar", 3, 10, {}, 6_166_250),
    ("googlenet_cifar", 3, 100, {}, 6_258_500),
    ("senet18", 3, 10, {}, 11_260_354),
    ("seresnet18", 3, 100, {}, 11_436_256),
    ("seresnet18", 3, 100, {"last_width": 512}, 11_314_012),
    ("inception_v4", 3, 1000, {"stem": "cifar"}, 42_679_816),
]
# What a small image needs, by the models that do not take any.
SMALL_IMAGES: dict[str, dict[str, Any]] = {"inception_v4": {"stem": "cifar"}}
IMAGE_MODELS = [name for name in models.names() if models.kind_of(name) == "images"]
QUICK = ["googlenet_cifar", "mlp", "resnet8", "senet18", "seresnet18"]
LIBRARIES = {"inception_v4": "timm", "vgg16_bn": "torchvision", "vgg19_bn": "torchvision"}


def built(name: str, image_size: int, in_channels: int = 3, num_classes: int = 10, **settings: Any) -> nn.Module:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    sizes = {"in_channels": in_channels, "num_classes": num_classes, "image_size": image_size}
    return models.build(name, sizes=sizes, **settings)


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "in_channels", "num_classes", "settings", "count"), COUNTS)
def test_parameter_count_is_the_published_one(
    name: str, in_channels: int, num_classes: int, settings: dict[str, Any], count: int
) -> None:
    with torch.device("meta"):
        model = built(name, 224, in_channels, num_classes, **settings)
    assert numel(model) == count


def test_mlp_counts_the_pixels_of_its_images() -> None:
    with torch.device("meta"):
        assert numel(built("mlp", 8, 1)) == 8_970


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_model_gives_logits_of_grey_images_and_a_gradient_for_every_parameter(name: str) -> None:
    with torch.device("meta"):
        model = built(name, 32, 1, 7, **SMALL_IMAGES.get(name, {}))
        logits = model(torch.empty(2, 1, 32, 32))
        assert logits.shape == (2, 7)
        logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", QUICK)
def test_no_weight_is_left_out_of_what_is_learnt(name: str) -> None:
    torch.manual_seed(0)
    model = built(name, 8)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), key
        # Batch normalisation cancels a convolution's bias; all four rectified numbers of a narrow squeeze may be 0.
        assert parameter.grad.any() or key.endswith("bias") or ".weigh." in key, key


@pytest.mark.parametrize(
    ("name", "image_size", "settings"),
    [
        ("resnet18", 8, {}),
        ("resnet50", 64, {}),
        ("vgg16_bn", 45, {}),
        ("vgg19_bn", 224, {}),
        ("googlenet", 8, {}),
        ("googlenet_cifar", 8, {}),
        ("senet18", 224, {}),
        ("seresnet18", 8, {}),
    ],
)
def test_images_of_other_sizes_fit(name: str, image_size: int, settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = built(name, image_size, **settings)
        assert model(torch.empty(2, 3, image_size, image_size)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "smallest", "settings"),
    [("vgg16_bn", 32, {}), ("inception_v4", 75, {}), ("inception_v4", 23, {"stem": "cifar"})],
)
def test_the_smallest_image_fits_and_none_smaller_would(name: str, smallest: int, settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = built(name, smallest, **settings)
        assert model(torch.empty(2, 3, smallest, smallest)).shape == (2, 10)
        with pytest.raises(RuntimeError):
            model(torch.empty(2, 3, smallest - 1, smallest - 1))


@pytest.mark.parametrize("name", ["googlenet_cifar", "mlp", "resnet8"])
def test_weights_follow_the_seed(name: str) -> None:
    def first_and_last(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        first, *_, last, _bias = built(name, 8, 1).parameters()
        return torch.cat([first.detach().flatten(), last.detach().flatten()])

    assert torch.equal(first_and_last(3), first_and_last(3))
    assert not torch.equal(first_and_last(3), first_and_last(4))


@pytest.mark.parametrize("name", ["resnet18", "resnet152"])
def test_a_stem_leaves_a_quarter_of_the_side_or_all_of_it(name: str) -> None:
    with torch.device("meta"):
        sides = [
            built(name, 32, stem=stem).get_submodule("stem")(torch.empty(2, 3, 32, 32)).shape[2:]
            for stem in ("imagenet", "cifar")
        ]
    assert sides == [(8, 8), (32, 32)]


@pytest.mark.parametrize("name", ["resnet34", "resnet50"])
def test_imagenet_networks_have_the_weights_that_torchvision_has(name: str) -> None:
    theirs = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        ours = built(name, 224, num_classes=1000, stem="imagenet")
        pairs = [sorted(tuple(p.shape) for p in model.parameters()) for model in (ours, getattr(theirs, name)())]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize(("name", "convolutions"), [("vgg16_bn", 13), ("vgg19_bn", 16)])
def test_vgg_has_one_linear_layer_and_batch_normalisation_after_every_convolution(name: str, convolutions: int) -> None:
    with torch.device("meta"):
        model = built(name, 32)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.BatchNorm2d), kinds.count(nn.Linear)) == (
        convolutions,
        convolutions,
        1,
    )


def test_squeeze_and_excitation_weighs_each_channel_by_one_number() -> None:
    from models.senet import SqueezeExcitation

    torch.manual_seed(0)
    weigh, features = SqueezeExcitation(32), torch.rand(2, 32, 3, 5) + 0.5
    weights = weigh(features) / features
    assert weights.shape == features.shape
    assert torch.allclose(weights, weights[:, :, :1, :1].expand_as(weights))
    assert ((weights > 0) & (weights < 1)).all()
    moved = features.roll(1, dims=3)  # the means stay, and with them the weights
    assert torch.allclose(weigh(moved), weigh(features).roll(1, dims=3))


def test_googlenet_for_small_images_halves_them_after_the_second_and_the_seventh_module() -> None:
    with torch.device("meta"):
        model = built("googlenet_cifar", 32)
        sides: list[int] = []
        for stage in ("stage3", "stage4", "stage5"):
            model.get_submodule(stage).register_forward_hook(lambda _, inputs, __: sides.append(inputs[0].shape[-1]))
        model(torch.empty(1, 3, 32, 32))
        modules = [len(list(model.get_submodule(stage).children())) for stage in ("stage3", "stage4", "stage5")]
    assert (sides, modules) == ([32, 16, 8], [2, 5, 2])


def test_a_bottleneck_halves_the_image_and_is_narrow_inside() -> None:
    from models.resnet import Bottleneck, projection_shortcut

    block = Bottleneck(8, 16, 2, projection_shortcut)
    assert block(torch.randn(2, 8, 5, 5)).shape == (2, 16, 3, 3)
    assert block.conv2.weight.shape == (4, 4, 3, 3)


def test_googlenet_halves_the_image_five_times_and_ends_1024_wide() -> None:
    with torch.device("meta"):
        model = built("googlenet", 224)
        features = model.get_submodule("stem")(torch.empty(1, 3, 224, 224))
        shapes = [tuple(features.shape[1:])]
        for stage in ("stage3", "stage4", "stage5"):
            features = model.get_submodule(stage)(
                features if stage == "stage3" else model.get_submodule("halve")(features)
            )
            shapes.append(tuple(features.shape[1:]))
    assert shapes == [(192, 28, 28), (480, 28, 28), (832, 14, 14), (1024, 7, 7)]


def test_auxiliary_heads_count_in_training_only() -> None:
    with torch.device("meta"):
        model = built("googlenet", 32, num_classes=5, auxiliary=True)
        calls: list[str] = []
        for place, head in model.get_submodule("auxiliary").named_children():
            head.register_forward_hook(lambda *_, place=place: calls.append(place))
        model(torch.empty(2, 3, 32, 32)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.eval()(torch.empty(2, 3, 32, 32))
    assert calls == ["0", "3"]


def test_convolutions_start_with_the_variance_of_he() -> None:
    torch.manual_seed(0)
    model = built("resnet18", 32)
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 20  # 1 stem, 16 in blocks, 3 projections
    for conv in convolutions:
        fan_out = conv.out_channels * conv.kernel_size[0] * conv.kernel_size[1]
        assert conv.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def test_option_a_shortcut_subsamples_and_appends_zero_channels() -> None:
    from models.resnet import PadShortcut

    inputs = torch.arange(2 * 2 * 4 * 4, dtype=torch.float32).view(2, 2, 4, 4)
    outputs = PadShortcut(2, 6, 2)(inputs)
    assert outputs.shape == (2, 6, 2, 2)
    assert torch.equal(outputs[:, :2], inputs[:, :, ::2, ::2])
    assert not outputs[:, 2:].any()


def test_mlp_takes_its_width_and_image_size() -> None:
    model = built("mlp", 6, 3, 4, hidden=5)
    assert next(model.parameters()).shape == (5, 3 * 6 * 6)
    assert model(torch.zeros(2, 3, 6, 6)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "resnet19",
            {},
            r"model must be one of .*, googlenet, .*, resnet18, .*, got 'resnet19'; did you mean 'resnet1?8'",
        ),
        ("transformer", {}, r"got 'transformer'$"),
        ("mlp", {"width": 3}, r"model 'mlp' allows only hidden, got 'width'"),
        ("mlp", {"image_size": 8}, r"model 'mlp' allows only hidden, got 'image_size'"),
        ("resnet20", {"depth": 3}, r"model 'resnet20' has no settings, got 'depth'"),
        ("resnet18", {"stem": "tiny"}, r"stem must be one of imagenet, cifar, got 'tiny'"),
        ("resnet50", {"stem": "tiny"}, r"stem must be one of imagenet, cifar, got 'tiny'"),
        ("inception_v4", {"stem": "tiny"}, r"stem must be one of imagenet, cifar, got 'tiny'"),
        ("inception_v4", {}, r"at least 75 with stem imagenet, 23 with stem cifar; got 31 with stem imagenet"),
        ("vgg16_bn", {}, r"vgg16_bn halves images five times and needs an image_size of at least 32, got 31"),
        ("seresnet18", {"last_width": 8}, r"last_width must be an integer of at least 16, got 8"),
        ("googlenet", {"auxiliary": "yes"}, r"auxiliary must be true or false, got 'yes'"),
        ("mlp", {"hidden": 0}, r"hidden must be an integer of at least 1, got 0"),
        ("mlp", {"hidden": "8"}, r"hidden must be an integer of at least 1, got '8'"),
    ],
)
def test_a_mistake_is_told_in_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        models.build(name, sizes={"in_channels": 1, "num_classes": 10, "image_size": 31}, **settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("vgg19_bn", "torchvision.models.vgg", r"^model vgg19_bn needs torchvision: pip install torchvision$"),
        ("inception_v4", "timm", r"^model inception_v4 needs timm: pip install timm$"),
    ],
)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, name: str, module: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ValueError, match=message):
        models.build(name, sizes={"in_channels": 3, "num_classes": 10, "image_size": 75})


def test_sizes_are_positive_and_those_that_a_model_needs() -> None:
    with pytest.raises(ValueError, match=r"num_classes must be an integer of at least 1, got 0"):
        models.build("mlp", sizes={"in_channels": 1, "num_classes": 0, "image_size": 8})
    with pytest.raises(ValueError, match=r"model 'resnet8' is for images and needs in_channels, the data set has num"):
        models.build("resnet8", sizes={"num_words": 9})


def test_mlp_names_the_image_shape_it_was_built_for() -> None:
    model = built("mlp", 8, 1)
    with pytest.raises(ValueError, match=r"built for images of shape \(1, 8, 8\), got \(3, 32, 32\)"):
        model(torch.zeros(1, 3, 32, 32))
