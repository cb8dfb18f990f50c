"""Squeeze-and-excitation networks: ResNets whose blocks scale their channels.

Source: Hu, Shen & Sun, Squeeze-and-Excitation Networks, CVPR 2018, arXiv 1709.01507. The two networks are from the
CIFAR studies of gradient sparsification; the paper's are for ImageNet.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from models.registry import positive, register
from models.resnet import ResNet, cifar_stem

REDUCTION = 16  # channels of the block / width between its two linear layers; the paper's choice


class SqueezeExcitation(nn.Module):
    """Scale each channel by a number in (0, 1), computed by two linear layers from all channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // REDUCTION)
        self.excite = nn.Linear(channels // REDUCTION, channels)

    def forward(self, features: Tensor) -> Tensor:
        """Map (batch, channels, h, w) to the same shape."""
        hidden = F.relu(self.squeeze(features.mean(dim=(2, 3))), inplace=True)
        return features * self.excite(hidden).sigmoid()[:, :, None, None]


class PreActivationBlock(nn.Module):
    """Normalise, rectify, convolve, twice; scale the channels and add the shortcut.

    Source of the order: He et al., Identity Mappings in Deep Residual Networks, ECCV 2016, arXiv 1603.05027. If the
    shape changes, the shortcut is a 1x1 convolution of the rectified input.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.weigh = SqueezeExcitation(out_channels)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = None if same_shape else nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, ceil(h / stride), ceil(w / stride))."""
        active = F.relu(self.bn1(inputs), inplace=True)
        hidden = F.relu(self.bn2(self.conv1(active)), inplace=True)
        shortcut = inputs if self.shortcut is None else self.shortcut(active)
        return self.weigh(self.conv2(hidden)) + shortcut


class PostActivationBlock(nn.Module):
    """Convolve, normalise, rectify, twice; scale the channels, add the shortcut and rectify again."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *_conv(in_channels, out_channels, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_conv(out_channels, out_channels, 3),
            nn.ReLU(inplace=True),
        )
        self.weigh = SqueezeExcitation(out_channels)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Sequential(*([] if same_shape else _conv(in_channels, out_channels, 1, stride=stride)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, ceil(h / stride), ceil(w / stride))."""
        return F.relu(self.weigh(self.convs(inputs)) + self.shortcut(inputs), inplace=True)


@register("images")
def senet18(*, in_channels: int, num_classes: int) -> nn.Module:
    """SENet-18 of the CIFAR-10 studies: ResNet-18 with pre-activation blocks that scale their channels.

    11,260,354 parameters for 3 channels and 10 classes.

    Differences from the paper: pre-activation blocks, with neither normalisation nor rectification after the last one
    nor normalisation in the shortcuts; a 3x3 convolution of stride 1 for a stem, for small images.
    """
    return ResNet(
        num_classes=num_classes,
        stem=cifar_stem(in_channels, 64),
        stem_width=64,
        widths=(64, 128, 256, 512),
        blocks=(2, 2, 2, 2),
        block=PreActivationBlock,
    )


@register("images")
def seresnet18(*, in_channels: int, num_classes: int, last_width: int = 516) -> nn.Module:
    """SE-ResNet-18 of the CIFAR-100 studies: ResNet-18 with post-activation blocks that scale their channels.

    11,436,256 parameters for 3 channels and 100 classes.

    Args:
        last_width: channels of the last stage. The published number of parameters implies 516; the usual 512 gives
            11,314,012.

    Differences from the paper: the residual is rectified before its channels are scaled, not only after the shortcut is
    added; a 3x3 convolution of stride 1 as stem, for small images. Convolutions keep biases, which batch normalisation
    cancels, because the published number of parameters includes them.

    Raises:
        ValueError: last_width is not an integer of at least 16.
    """
    positive(last_width=last_width)
    if last_width < REDUCTION:
        raise ValueError(f"last_width must be an integer of at least {REDUCTION}, got {last_width}")
    return ResNet(
        num_classes=num_classes,
        stem=nn.Sequential(*_conv(in_channels, 64, 3), nn.ReLU(inplace=True)),
        stem_width=64,
        widths=(64, 128, 256, last_width),
        blocks=(2, 2, 2, 2),
        block=PostActivationBlock,
    )


def _conv(in_channels: int, out_channels: int, size: int, *, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2)
    return conv, nn.BatchNorm2d(out_channels)
