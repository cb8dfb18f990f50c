"""What every model promises: its size, its shapes, its seed and its errors."""

import pytest
import torch

import models

SIZES = [
    ("resnet18", 3, 10, 11_173_962),
    ("resnet18", 3, 100, 11_220_132),
    ("resnet20", 3, 10, 269_722),
    ("resnet8", 1, 10, 75_002),
    ("resnet50", 3, 1000, 25_557_032),
    ("googlenet", 3, 1000, 6_998_552),
    ("mlp", 1, 10, 8_970),
]


@pytest.mark.parametrize(("name", "in_channels", "num_classes", "numel"), SIZES)
def test_parameter_count_is_the_published_one(name: str, in_channels: int, num_classes: int, numel: int) -> None:
    with torch.device("meta"):
        model = models.build(name, in_channels=in_channels, num_classes=num_classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


@pytest.mark.parametrize("name", models.names())
def test_every_model_gives_logits_and_a_gradient_for_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, in_channels=1, num_classes=7)
    logits = model(torch.randn(5, 1, 8, 8))
    assert logits.shape == (5, 7)
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["googlenet", "resnet18", "resnet20", "resnet50"])
def test_cifar_networks_take_cifar_images(name: str) -> None:
    model = models.build(name, in_channels=3, num_classes=10).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", models.names())
def test_weights_follow_the_seed(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = models.build(name, in_channels=1, num_classes=10)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


@pytest.mark.parametrize(("stem", "side"), [("imagenet", 8), ("cifar", 32)])
def test_resnet50_leaves_a_quarter_of_the_side_or_all_of_it_to_its_stages(stem: str, side: int) -> None:
    with torch.device("meta"):
        model = models.build("resnet50", in_channels=3, num_classes=10, stem=stem)
        assert model.get_submodule("stem")(torch.empty(2, 3, 32, 32)).shape == (2, 64, side, side)


def test_a_bottleneck_halves_the_image_and_is_narrow_inside() -> None:
    from models.resnet import Bottleneck, projection_shortcut

    block = Bottleneck(8, 16, 2, projection_shortcut)
    assert block(torch.randn(2, 8, 5, 5)).shape == (2, 16, 3, 3)
    assert block.conv2.weight.shape == (4, 4, 3, 3)


def test_googlenet_halves_the_image_five_times_and_ends_1024_wide() -> None:
    with torch.device("meta"):
        model = models.build("googlenet", in_channels=3, num_classes=10)
        features = model.get_submodule("stem")(torch.empty(1, 3, 224, 224))
        shapes = [tuple(features.shape[1:])]
        for stage in ("stage3", "stage4", "stage5"):
            features = model.get_submodule(stage)(
                features if stage == "stage3" else model.get_submodule("halve")(features)
            )
            shapes.append(tuple(features.shape[1:]))
    assert shapes == [(192, 28, 28), (480, 28, 28), (832, 14, 14), (1024, 7, 7)]


def test_auxiliary_heads_count_in_training_only() -> None:
    torch.manual_seed(0)
    model = models.build("googlenet", in_channels=3, num_classes=5, auxiliary=True)
    images = torch.randn(2, 3, 32, 32)
    model(images).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    plain = models.build("googlenet", in_channels=3, num_classes=5)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "auxiliary" not in name})
    assert torch.equal(model.eval()(images), plain.eval()(images))
    with torch.device("meta"):
        whole = models.build("googlenet", in_channels=3, num_classes=1000, auxiliary=True)
    assert sum(parameter.numel() for parameter in whole.parameters()) == 13_378_280


def test_convolutions_start_with_the_variance_of_he() -> None:
    torch.manual_seed(0)
    model = models.build("resnet18", in_channels=3, num_classes=10)
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
    model = models.build("mlp", in_channels=3, num_classes=4, hidden=5, image_size=6)
    assert next(model.parameters()).shape == (5, 3 * 6 * 6)
    assert model(torch.zeros(2, 3, 6, 6)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "resnet19",
            {},
            r"model must be one of googlenet, mlp, resnet18, .*, resnet8, got 'resnet19'; did you mean 'resnet1?8'",
        ),
        ("transformer", {}, r"got 'transformer'$"),
        ("mlp", {"width": 3}, r"model 'mlp' allows only hidden, image_size, got 'width'"),
        ("resnet20", {"depth": 3}, r"model 'resnet20' has no settings, got 'depth'"),
        ("resnet50", {"stem": "tiny"}, r"stem must be one of imagenet, cifar, got 'tiny'"),
        ("googlenet", {"auxiliary": "yes"}, r"auxiliary must be true or false, got 'yes'"),
        ("mlp", {"hidden": 0}, r"hidden must be an integer of at least 1, got 0"),
        ("mlp", {"hidden": "8"}, r"hidden must be an integer of at least 1, got '8'"),
    ],
)
def test_a_mistake_is_told_in_one_line(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        models.build(name, in_channels=1, num_classes=10, **settings)
    assert "\n" not in str(raised.value)


def test_classes_and_channels_are_positive() -> None:
    with pytest.raises(ValueError, match=r"num_classes must be an integer of at least 1, got 0"):
        models.build("mlp", in_channels=1, num_classes=0)


def test_mlp_names_the_image_shape_it_was_built_for() -> None:
    model = models.build("mlp", in_channels=1, num_classes=10)
    with pytest.raises(ValueError, match=r"built for images of shape \(1, 8, 8\), got \(3, 32, 32\)"):
        model(torch.zeros(1, 3, 32, 32))
