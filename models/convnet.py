"""A plain convolutional network that learns CIFAR-10 to 94 % in a few epochs.

Sizes are those of the network of KellerJordan/cifar10-airbench (its paper: Jordan, 94% on CIFAR-10 in 3.29 Seconds on a
Single GPU, 2024, arXiv 2404.00498). Differences: the first convolution is learned as all others, not set from patches
of the images; weights are initialised as torch does; batch normalisation has its scale.
"""

from torch import Tensor, nn

from models.registry import register

WIDTHS = (64, 256, 256)
STEM_WIDTH = 24
LOGIT_SCALE = 1 / 9  # keeps the first logits small, as in the source
SIDE = 32  # pixels: the poolings leave one


class ConvNet(nn.Module):
    """A 2x2 convolution, three groups of two convolutions that halve the image, and a linear head."""

    def __init__(self, *, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, STEM_WIDTH, 2), nn.GELU())
        inputs = (STEM_WIDTH, *WIDTHS)
        self.groups = nn.Sequential(*(_group(*pair) for pair in zip(inputs[:-1], WIDTHS, strict=True)))
        self.pool = nn.MaxPool2d(3)
        self.head = nn.Linear(WIDTHS[-1], num_classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, 32, 32) float32 images to (batch, num_classes) logits."""
        return self.head(self.pool(self.groups(self.stem(inputs))).flatten(1)) * LOGIT_SCALE


@register("images")
def convnet(*, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """The network for images of 32 pixels a side.

    1,972,792 parameters for 3 channels and 10 classes.

    Raises:
        ValueError: the images have other sides.
    """
    if image_size != SIDE:
        raise ValueError(f"convnet is for an image_size of {SIDE}, got {image_size}: take resnet8 or mlp")
    return ConvNet(in_channels=in_channels, num_classes=num_classes)


def _group(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(out_channels),
        nn.GELU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.GELU(),
    )
