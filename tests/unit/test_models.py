"""What every model promises: its size, its shapes, its seed and its errors."""

import pytest
import torch

import models

SIZES = [
    ("resnet18", 3, 10, 11_173_962),
    ("resnet18", 3, 100, 11_220_132),
    ("resnet20", 3, 10, 269_722),
    ("resnet8", 1, 10, 75_002),
    ("mlp", 1, 10, 8_970),
]


@pytest.mark.parametrize(("name", "in_channels", "num_classes", "numel"), SIZES)
def test_parameter_count_is_the_published_one(name: str, in_channels: int, num_classes: int, numel: int) -> None:
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


@pytest.mark.parametrize("name", ["resnet18", "resnet20"])
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
            r"model must be one of mlp, resnet18, resnet20, resnet8, got 'resnet19'; did you mean 'resnet1?8'",
        ),
        ("transformer", {}, r"got 'transformer'$"),
        ("mlp", {"width": 3}, r"model 'mlp' allows only hidden, image_size, got 'width'"),
        ("resnet20", {"depth": 3}, r"model 'resnet20' has no settings, got 'depth'"),
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
