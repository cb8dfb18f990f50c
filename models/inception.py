"""Inception-v4 of timm, with the paper's stem or one for small images.

Source: Szegedy, Ioffe, Vanhoucke & Alemi, Inception-v4, Inception-ResNet and the Impact of Residual Connections on
Learning, AAAI 2017, arXiv 1602.07261, figures 3 to 9.
"""

from typing import Any

from torch import nn

from models.registry import register

DROPOUT = 0.2  # figure 9: 0.8 is kept
SMALLEST_IMAGE = {
    "imagenet": 75,
    "cifar": 23,
}  # least pixels of a side: smaller images shrink to nothing


@register("images")
def inception_v4(*, in_channels: int, num_classes: int, image_size: int, stem: str = "imagenet") -> nn.Module:
    """Inception-v4.

    42,679,816 parameters for 3 channels and 1000 classes, with either stem.

    Args:
        stem: ``imagenet``, the paper's, for images of at least 75 pixels; or ``cifar``, for at least 23.

    Differences from the paper: with stem ``cifar`` the first convolution and the first parallel pair of pooling and
    convolution have stride 1 instead of 2, so a 32-pixel image reaches the last stage at 2x2. Weights have timm's
    initialisation, torch's default.

    Raises:
        ValueError: no such stem, the images are too small for it, or timm is not installed.
    """
    _check(stem, image_size)
    try:
        import timm
    except ImportError:
        raise ValueError("model inception_v4 needs timm: pip install timm") from None
    model = timm.create_model("inception_v4", num_classes=num_classes, in_chans=in_channels, drop_rate=DROPOUT)
    if stem == "cifar":
        layers: Any = model.features
        first, side_by_side = layers[0], layers[3]
        first.conv.stride = side_by_side.conv.conv.stride = (1, 1)
        side_by_side.maxpool.stride = 1
    return model


def _check(stem: str, image_size: int) -> None:
    if stem not in SMALLEST_IMAGE:
        raise ValueError(f"stem must be one of {', '.join(SMALLEST_IMAGE)}, got {stem!r}")
    if image_size < SMALLEST_IMAGE[stem]:
        needs = ", ".join(f"{smallest} with stem {name}" for name, smallest in SMALLEST_IMAGE.items())
        raise ValueError(f"inception_v4 needs an image_size of at least {needs}; got {image_size} with stem {stem}")
