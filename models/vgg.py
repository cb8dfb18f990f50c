"""VGG networks: stacks of 3x3 convolutions between max-poolings.

Source: Simonyan & Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015,
arXiv 1409.1556, table 1, columns D and E.
"""

from torch import Tensor, nn

from models.registry import register

SMALLEST_IMAGE = 32  # least pixels of a side: five max-poolings leave one


class VGG(nn.Module):
    """Convolutions with batch normalisation, a mean over the image, and a linear head.

    Initialised as in He et al., ICCV 2015, arXiv 1502.01852: convolutions by the fan-out rule, biases to zero.
    """

    def __init__(self, *, features: nn.Sequential, num_classes: int) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(512, num_classes)
        self._initialise_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) float32 images to (batch, num_classes) logits."""
        return self.head(self.features(inputs).mean(dim=(2, 3)))

    def _initialise_(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        nn.init.zeros_(self.head.bias)


@register("images")
def vgg16_bn(*, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """VGG-16 with batch normalisation, as in the CIFAR studies of gradient sparsification.

    14,728,266 parameters for 3 channels and 10 classes. The convolution layers are torchvision's.

    Differences from the paper: batch normalisation after every convolution; one linear layer instead of three, on the
    mean over the image, for any image of at least 32 pixels.

    Raises:
        ValueError: the images are smaller than 32 pixels, or torchvision is not installed.
    """
    return VGG(features=_features("vgg16_bn", "D", in_channels, image_size), num_classes=num_classes)


@register("images")
def vgg19_bn(*, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """VGG-19 with batch normalisation: as `vgg16_bn`, with three more convolutions.

    20,040,522 parameters for 3 channels and 10 classes.

    Raises:
        ValueError: the images are smaller than 32 pixels, or torchvision is not installed.
    """
    return VGG(features=_features("vgg19_bn", "E", in_channels, image_size), num_classes=num_classes)


def _features(model: str, column: str, in_channels: int, image_size: int) -> nn.Sequential:
    if image_size < SMALLEST_IMAGE:
        raise ValueError(
            f"{model} halves images five times and needs an image_size of at least {SMALLEST_IMAGE}, got {image_size}"
        )
    try:
        from torchvision.models.vgg import cfgs, make_layers
    except ImportError:
        raise ValueError(f"model {model} needs torchvision: pip install torchvision") from None
    features = make_layers(cfgs[column], batch_norm=True)
    if in_channels != features[0].in_channels:  # torchvision builds networks for colour images only
        features[0] = nn.Conv2d(in_channels, features[0].out_channels, 3, padding=1)
    return features
