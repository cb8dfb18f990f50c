"""The multilayer perceptron, the smallest model here."""

from torch import Tensor, nn

from models.registry import positive, register


class MLP(nn.Module):
    """Two hidden ReLU layers over the flattened image.

    Initialised as in He et al., ICCV 2015, arXiv 1502.01852: fan-in normal weights, zero biases.
    """

    def __init__(self, *, in_channels: int, num_classes: int, hidden: int, image_size: int) -> None:
        super().__init__()
        self.image_shape = (in_channels, image_size, image_size)
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(in_channels * image_size**2, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, in_channels, image_size, image_size) float32 images to (batch, num_classes) logits.

        Raises:
            ValueError: the images have another shape than the model was built for.
        """
        if tuple(inputs.shape[1:]) != self.image_shape:
            raise ValueError(
                f"mlp was built for images of shape {self.image_shape}, got {tuple(inputs.shape[1:])}: "
                "build it with the data set's in_channels and image_size"
            )
        return self.layers(inputs)


@register("images")
def mlp(*, in_channels: int, num_classes: int, image_size: int, hidden: int = 64) -> nn.Module:
    """Build a perceptron with two hidden layers of width ``hidden`` for square images of side ``image_size``.

    8,970 parameters for 8x8 images of 1 channel, 10 classes and the default width.

    Raises:
        ValueError: hidden is not an integer of at least 1.
    """
    positive(hidden=hidden)
    return MLP(in_channels=in_channels, num_classes=num_classes, hidden=hidden, image_size=image_size)
