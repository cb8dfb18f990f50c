"""GoogLeNet with batch normalisation for images of CIFAR's size.

Source: Szegedy, Liu, Jia et al., Going Deeper with Convolutions, CVPR 2015, arXiv 1409.4842, table 1, for the widths;
Ioffe & Szegedy, Batch Normalization, ICML 2015, arXiv 1502.03167, for the normalisation and the pair of 3x3
convolutions in place of a 5x5.
"""

from torch import Tensor, nn

from models.googlenet import STAGE3, STAGE4, STAGE5, initialise_, stage
from models.registry import register

STEM_WIDTH = 192


class GoogLeNetCifar(nn.Module):
    """A stem that keeps the image's size, nine inception modules in three stages, and a linear head.

    Initialised as in He et al., ICCV 2015, arXiv 1502.01852: fan-in normal weights, zero biases.
    """

    def __init__(self, *, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = _conv(in_channels, STEM_WIDTH, 3)
        self.stage3 = stage(STEM_WIDTH, STAGE3, conv=_conv, five=(3, 3))
        self.stage4 = stage(STAGE3[-1].total, STAGE4, conv=_conv, five=(3, 3))
        self.stage5 = stage(STAGE4[-1].total, STAGE5, conv=_conv, five=(3, 3))
        self.halve = nn.MaxPool2d(3, stride=2, padding=1)
        self.head = nn.Linear(STAGE5[-1].total, num_classes)
        initialise_(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) float32 images to (batch, num_classes) logits."""
        features = self.halve(self.stage3(self.stem(inputs)))
        features = self.stage5(self.halve(self.stage4(features)))
        return self.head(features.mean(dim=(2, 3)))


@register("images")
def googlenet_cifar(*, in_channels: int, num_classes: int) -> nn.Module:
    """GoogLeNet as in the CIFAR studies of gradient sparsification; larger and smaller images work too.

    6,166,250 parameters for 3 channels and 10 classes, 6,258,500 for 100 classes.

    Differences from the paper's ImageNet network: the stem is one 3x3 convolution of stride 1 with 192 channels; batch
    normalisation after every convolution and no other normalisation; two 3x3 convolutions replace a 5x5; no dropout and
    no auxiliary heads. Convolutions keep biases, which batch normalisation cancels, because the published numbers of
    parameters include them.
    """
    return GoogLeNetCifar(in_channels=in_channels, num_classes=num_classes)


def _conv(in_channels: int, out_channels: int, size: int) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, size, padding=size // 2)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))
