"""GoogLeNet: layers of parallel convolutions of several sizes.

Source: Szegedy, Liu, Jia et al., Going Deeper with Convolutions, CVPR 2015, arXiv 1409.4842, table 1 and section 5.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.registry import register

Conv = Callable[[int, int, int], nn.Sequential]  # a function of in_channels, out_channels, size
AUXILIARY_WEIGHT = 0.3  # section 5


class Widths(NamedTuple):
    """Channels of an inception module's branches, as in table 1."""

    one: int
    reduce3: int
    three: int
    reduce5: int
    five: int
    pool: int

    @property
    def total(self) -> int:
        """Channels of the output."""
        return self.one + self.three + self.five + self.pool


STAGE3 = (Widths(64, 96, 128, 16, 32, 32), Widths(128, 128, 192, 32, 96, 64))
STAGE4 = (
    Widths(192, 96, 208, 16, 48, 64),
    Widths(160, 112, 224, 24, 64, 64),
    Widths(128, 128, 256, 24, 64, 64),
    Widths(112, 144, 288, 32, 64, 64),
    Widths(256, 160, 320, 32, 128, 128),
)
STAGE5 = (Widths(256, 160, 320, 32, 128, 128), Widths(384, 192, 384, 48, 128, 128))


def conv_relu(in_channels: int, out_channels: int, size: int, *, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the side, or divides it by the stride, and a ReLU."""
    conv = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2)
    return nn.Sequential(conv, nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Parallel 1x1, 3x3 and 5x5 convolutions and a max-pooling, with concatenated channels.

    Args:
        conv: makes a convolution of (in_channels, out_channels, size).
        five: sizes of the convolutions of the third branch.
    """

    def __init__(self, in_channels: int, widths: Widths, *, conv: Conv = conv_relu, five: Sequence[int] = (5,)) -> None:
        super().__init__()
        self.one = conv(in_channels, widths.one, 1)
        self.three = nn.Sequential(conv(in_channels, widths.reduce3, 1), conv(widths.reduce3, widths.three, 3))
        inputs = (widths.reduce5, *[widths.five] * (len(five) - 1))
        self.five = nn.Sequential(
            conv(in_channels, widths.reduce5, 1),
            *(conv(width, widths.five, size) for width, size in zip(inputs, five, strict=True)),
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv(in_channels, widths.pool, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, widths.total, h, w)."""
        return torch.cat([self.one(inputs), self.three(inputs), self.five(inputs), self.pool(inputs)], 1)


def stage(
    in_channels: int, modules: Sequence[Widths], *, conv: Conv = conv_relu, five: Sequence[int] = (5,)
) -> nn.Sequential:
    """Return inception modules in sequence."""
    before = (in_channels, *(widths.total for widths in modules[:-1]))
    pairs = zip(before, modules, strict=True)
    return nn.Sequential(*(Inception(width, widths, conv=conv, five=five) for width, widths in pairs))


class AuxiliaryHead(nn.Module):
    """A classifier on intermediate features: pooled to 4x4, a 1x1 convolution, two linear layers."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = conv_relu(in_channels, 128, 1)
        self.hidden = nn.Linear(128 * 4 * 4, 1024)
        self.dropout = nn.Dropout(0.7)
        self.head = nn.Linear(1024, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, num_classes)."""
        pooled = self.conv(F.adaptive_avg_pool2d(features, 4))
        return self.head(self.dropout(F.relu(self.hidden(pooled.flatten(1)), inplace=True)))


class GoogLeNet(nn.Module):
    """A stem, nine inception modules in three stages, and a linear head.

    Initialised as in He et al., ICCV 2015, arXiv 1502.01852: fan-in normal weights, zero biases.
    """

    def __init__(self, *, in_channels: int, num_classes: int, auxiliary: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv_relu(in_channels, 64, 7, stride=2),
            _halve(),
            nn.LocalResponseNorm(5),
            conv_relu(64, 64, 1),
            conv_relu(64, 192, 3),
            nn.LocalResponseNorm(5),
            _halve(),
        )
        self.stage3 = stage(192, STAGE3)
        self.stage4 = stage(STAGE3[-1].total, STAGE4)
        self.stage5 = stage(STAGE4[-1].total, STAGE5)
        self.halve = _halve()
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(STAGE5[-1].total, num_classes)
        # After modules 4a and 4d, the first and the fourth of their stage.
        places = {"0": STAGE4[0].total, "3": STAGE4[3].total} if auxiliary else {}
        self.auxiliary = nn.ModuleDict({place: AuxiliaryHead(width, num_classes) for place, width in places.items()})
        initialise_(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) float32 images to (batch, num_classes) logits."""
        features = self.halve(self.stage3(self.stem(inputs)))
        aside = []
        for place, module in enumerate(self.stage4):
            features = module(features)
            if self.training and str(place) in self.auxiliary:
                aside.append(self.auxiliary[str(place)](features))
        features = self.stage5(self.halve(features)).mean(dim=(2, 3))
        logits = self.head(self.dropout(features))
        return logits + AUXILIARY_WEIGHT * sum(aside) if aside else logits


def initialise_(net: nn.Module) -> None:
    """Draw the weights of every layer by He et al.'s rule for ReLU, and set its biases to zero."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]


@register("images")
def googlenet(*, in_channels: int, num_classes: int, auxiliary: bool = False) -> nn.Module:
    """GoogLeNet without batch normalisation, for images of ImageNet's size; smaller images work too.

    6,998,552 parameters in 116 tensors for 3 channels and 1000 classes; 13,378,280 in 128 with the auxiliary heads.

    Args:
        auxiliary: add the two classifiers on intermediate features, which are used in training only.

    Differences from the paper: models here return only one output, so the auxiliary heads have no separate losses. In
    training their logits are added to the main ones with the paper's loss weight, 0.3: sizes and computation of
    gradients are the paper's, but the training objective is not. The heads pool to 4x4 at any image size.

    Raises:
        ValueError: auxiliary is not a boolean.
    """
    if not isinstance(auxiliary, bool):
        raise ValueError(f"auxiliary must be true or false, got {auxiliary!r}")
    return GoogLeNet(in_channels=in_channels, num_classes=num_classes, auxiliary=auxiliary)


def _halve() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, padding=1)
