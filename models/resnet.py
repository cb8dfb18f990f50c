"""Residual networks (ResNet), for small images and for ImageNet.

Source: He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, CVPR 2016, arXiv 1512.03385.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from models.registry import register

Shortcut = Callable[[int, int, int], nn.Module]  # (in_channels, out_channels, stride) -> module
Block = Callable[[int, int, int], nn.Module]  # (in_channels, out_channels, stride) -> module
EXPANSION = 4  # a bottleneck's outer width relative to its inner width


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
    """Two 3x3 convolutions with a shortcut, the identity if the shape stays."""

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


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with a shortcut; the inner width is a quarter of the outer.

    Differences from the paper: the 3x3 convolution has the stride, not the first 1x1, so no input is skipped. The
    number of parameters is the same.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        width = out_channels // EXPANSION
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same_shape else shortcut(in_channels, out_channels, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, ceil(h / stride), ceil(w / stride))."""
        hidden = F.relu(self.bn1(self.conv1(inputs)), inplace=True)
        hidden = F.relu(self.bn2(self.conv2(hidden)), inplace=True)
        return F.relu(self.bn3(self.conv3(hidden)) + self.shortcut(inputs), inplace=True)


class ResNet(nn.Module):
    """A stem, stages of blocks (from the second on they halve the image), and a linear head.

    Initialised as in He et al., ICCV 2015, arXiv 1502.01852: convolutions by the fan-out rule of the authors' code,
    batch normalisation to the identity, biases of convolutions and head to zero.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        stem: nn.Sequential,
        stem_width: int,
        widths: Sequence[int],
        blocks: Sequence[int],
        block: Block,
    ) -> None:
        super().__init__()
        self.stem = stem
        stage_inputs = (stem_width, *widths[:-1])
        self.stages = nn.Sequential(
            *(
                _stage(before, width, stride=1 if stage == 0 else 2, num_blocks=num_blocks, block=block)
                for stage, (before, width, num_blocks) in enumerate(zip(stage_inputs, widths, blocks, strict=True))
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
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.zeros_(self.head.bias)


@register("images")
def resnet18(*, in_channels: int, num_classes: int, stem: str = "cifar") -> nn.Module:
    """ResNet-18 with projection shortcuts, by default as in the CIFAR studies of gradient sparsification.

    11,173,962 parameters for 3 channels and 10 classes, 11,220,132 for 100 classes; with the paper's stem and 1000
    classes 11,689,512.

    Args:
        stem: ``cifar``, one 3x3 convolution of stride 1, for small images; or ``imagenet``, the paper's 7x7 convolution
            of stride 2 and max-pooling, for a quarter of the side length.

    Raises:
        ValueError: no such stem.
    """
    return _resnet(in_channels, num_classes, stem, blocks=(2, 2, 2, 2), block=BasicBlock)


@register("images")
def resnet34(*, in_channels: int, num_classes: int, stem: str = "cifar") -> nn.Module:
    """ResNet-34: as ResNet-18, with more blocks.

    21,282,122 parameters for 3 channels and 10 classes; with the paper's stem and 1000 classes 21,797,672.

    Args:
        stem: as of `resnet18`.

    Raises:
        ValueError: no such stem.
    """
    return _resnet(in_channels, num_classes, stem, blocks=(3, 4, 6, 3), block=BasicBlock)


@register("images")
def resnet50(*, in_channels: int, num_classes: int, stem: str = "imagenet") -> nn.Module:
    """ResNet-50: bottleneck blocks with projection shortcuts.

    25,557,032 parameters in 161 tensors for 3 channels and 1000 classes.

    Args:
        stem: ``imagenet``, the paper's 7x7 convolution of stride 2 and max-pooling, for a quarter of the side length;
            or ``cifar``, one 3x3 convolution of stride 1 for small images.

    Raises:
        ValueError: no such stem.
    """
    return _resnet(in_channels, num_classes, stem, blocks=(3, 4, 6, 3), block=Bottleneck)


@register("images")
def resnet152(*, in_channels: int, num_classes: int, stem: str = "imagenet") -> nn.Module:
    """ResNet-152: as ResNet-50, with more blocks.

    60,192,808 parameters for 3 channels and 1000 classes; with the small stem and 10 classes 58,156,618.

    Args:
        stem: as of `resnet50`.

    Raises:
        ValueError: no such stem.
    """
    return _resnet(in_channels, num_classes, stem, blocks=(3, 8, 36, 3), block=Bottleneck)


@register("images")
def resnet8(*, in_channels: int, num_classes: int) -> nn.Module:
    """ResNet-8: the family of `resnet20` with n = 1, for 8x8 digits and for quick runs on a CPU.

    75,002 parameters for 1 channel and 10 classes. The paper has no network this small.
    """
    return _cifar_resnet(in_channels, num_classes, blocks=1)


@register("images")
def resnet20(*, in_channels: int, num_classes: int) -> nn.Module:
    """ResNet-20 of the paper's section 4.2: 6n + 2 layers with n = 3, parameter-free option-A shortcuts.

    269,722 parameters for 3 channels and 10 classes (the paper's 0.27 million).
    """
    return _cifar_resnet(in_channels, num_classes, blocks=3)


@register("images")
def resnet56(*, in_channels: int, num_classes: int) -> nn.Module:
    """The same family with n = 9.

    853,018 parameters for 3 channels and 10 classes (the paper's 0.85 million).
    """
    return _cifar_resnet(in_channels, num_classes, blocks=9)


@register("images")
def resnet110(*, in_channels: int, num_classes: int) -> nn.Module:
    """The same family with n = 18.

    1,727,962 parameters for 3 channels and 10 classes (the paper's 1.7 million). The paper starts with a
    learning rate of 0.01, because 0.1 is too large at first.
    """
    return _cifar_resnet(in_channels, num_classes, blocks=18)


def cifar_stem(in_channels: int, width: int) -> nn.Sequential:
    """One 3x3 convolution of stride 1, for small images."""
    return nn.Sequential(_conv3x3(in_channels, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def imagenet_stem(in_channels: int, width: int) -> nn.Sequential:
    """A 7x7 convolution of stride 2 and max-pooling, for a quarter of the side length."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


STEMS = {"imagenet": imagenet_stem, "cifar": cifar_stem}


def _resnet(
    in_channels: int, num_classes: int, stem: str, *, blocks: Sequence[int], block: type[BasicBlock | Bottleneck]
) -> nn.Module:
    expansion = EXPANSION if block is Bottleneck else 1
    return ResNet(
        num_classes=num_classes,
        stem=_stem(stem, in_channels),
        stem_width=64,
        widths=[expansion * width for width in (64, 128, 256, 512)],
        blocks=blocks,
        block=partial(block, shortcut=projection_shortcut),
    )


def _stem(name: str, in_channels: int) -> nn.Sequential:
    if name not in STEMS:
        raise ValueError(f"stem must be one of {', '.join(STEMS)}, got {name!r}")
    return STEMS[name](in_channels, 64)


def _cifar_resnet(in_channels: int, num_classes: int, *, blocks: int) -> nn.Module:
    return ResNet(
        num_classes=num_classes,
        stem=cifar_stem(in_channels, 16),
        stem_width=16,
        widths=(16, 32, 64),
        blocks=(blocks, blocks, blocks),
        block=partial(BasicBlock, shortcut=PadShortcut),
    )


def _stage(in_channels: int, width: int, *, stride: int, num_blocks: int, block: Block) -> nn.Sequential:
    first = block(in_channels, width, stride)
    return nn.Sequential(first, *(block(width, width, 1) for _ in range(num_blocks - 1)))


def _conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    # Batch normalisation follows every convolution and would cancel a bias.
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
