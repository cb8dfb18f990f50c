"""Residual networks for small images.

Source: He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, CVPR 2016, arXiv 1512.03385.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from models.registry import register

Shortcut = Callable[[int, int, int], nn.Module]  # (in_channels, out_channels, stride) -> module


class PadShortcut(nn.Module):
    """Change the shape without parameters: subsample by the stride, append zero channels (the paper's option A)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra_channels = out_channels - in_channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, ceil(h / stride), ceil(w / stride))."""
        return F.pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))


def projection_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Change the shape by a 1x1 convolution and batch normalisation (the paper's option B)."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is the identity where the shape stays."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels, 1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same_shape else shortcut(in_channels, out_channels, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, ceil(h / stride), ceil(w / stride))."""
        hidden = F.relu(self.bn1(self.conv1(inputs)), inplace=True)
        return F.relu(self.bn2(self.conv2(hidden)) + self.shortcut(inputs), inplace=True)


class ResNet(nn.Module):
    """A 3x3 stem, stages of basic blocks that halve the image from the second stage on, and a linear head.

    Initialised as in He et al., ICCV 2015, arXiv 1502.01852: convolutions by the fan-out rule that the authors'
    released code uses, batch normalisation to the identity, the head's bias to zero.
    """

    def __init__(
        self, *, in_channels: int, num_classes: int, widths: Sequence[int], blocks: int, shortcut: Shortcut
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv3x3(in_channels, widths[0], 1), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True))
        stage_inputs = (widths[0], *widths[:-1])
        self.stages = nn.Sequential(
            *(
                _stage(before, width, stride=1 if stage == 0 else 2, blocks=blocks, shortcut=shortcut)
                for stage, (before, width) in enumerate(zip(stage_inputs, widths, strict=True))
            )
        )
        self.head = nn.Linear(widths[-1], num_classes)
        self._initialise_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) float32 images to (batch, num_classes) logits."""
        return self.head(self.stages(self.stem(inputs)).mean(dim=(2, 3)))

    def _initialise_(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)


@register
def resnet18(*, in_channels: int, num_classes: int) -> nn.Module:
    """ResNet-18 as the CIFAR studies of gradient sparsification use it.

    11,173,962 parameters for 3 channels and 10 classes, 11,220,132 for 100 classes. Differences from the paper's
    ImageNet network: the stem is one 3x3 convolution of stride 1, and there is no max-pooling. Projection shortcuts.
    """
    widths = (64, 128, 256, 512)
    return ResNet(
        in_channels=in_channels, num_classes=num_classes, widths=widths, blocks=2, shortcut=projection_shortcut
    )


@register
def resnet20(*, in_channels: int, num_classes: int) -> nn.Module:
    """ResNet-20 of the paper's section 4.2: 6n + 2 layers with n = 3, parameter-free option-A shortcuts.

    269,722 parameters for 3 channels and 10 classes (the paper's 0.27 million).
    """
    return _cifar_resnet(in_channels, num_classes, blocks=3)


@register
def resnet8(*, in_channels: int, num_classes: int) -> nn.Module:
    """The same family with n = 1, for 8x8 digits and for quick runs on a CPU.

    75,002 parameters for 1 channel and 10 classes. The paper has no network this small.
    """
    return _cifar_resnet(in_channels, num_classes, blocks=1)


def _cifar_resnet(in_channels: int, num_classes: int, *, blocks: int) -> nn.Module:
    widths = (16, 32, 64)
    return ResNet(in_channels=in_channels, num_classes=num_classes, widths=widths, blocks=blocks, shortcut=PadShortcut)


def _stage(in_channels: int, width: int, *, stride: int, blocks: int, shortcut: Shortcut) -> nn.Sequential:
    first = BasicBlock(in_channels, width, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(width, width, 1, shortcut) for _ in range(blocks - 1)))


def _conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    # Batch normalisation follows every convolution and would cancel a bias.
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
