"""Random changes to training images, on whole batches at once."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

PAD = 4  # He et al., CVPR 2016, arXiv 1512.03385, section 4.2: "4 pixels are padded on each side"
NUM_DRAWS = 3  # random integers that an augmentation may use per image

# (batch, channels, height, width) images of any type, (batch, NUM_DRAWS) int64 draws in [0, 2^31) -> images
Augment = Callable[[Tensor, Tensor], Tensor]


def none(images: Tensor, draws: Tensor) -> Tensor:
    """Return the images as they are."""
    return images


def crop_flip(images: Tensor, draws: Tensor) -> Tensor:
    """Crop each image out of its zero-padded self and mirror every other one, at random.

    The augmentation of He et al., CVPR 2016, arXiv 1512.03385, section 4.2.

    Args:
        images: (batch, channels, height, width). Not modified.
        draws: (batch, 3) random integers: row and column of the crop, and whether to mirror.
    Returns:
        new images of the same shape and type.
    """
    height, width = images.shape[2:]
    windows = F.pad(images, (PAD, PAD, PAD, PAD)).unfold(2, height, 1).unfold(3, width, 1)
    top, left = (draws[:, :2] % (2 * PAD + 1)).unbind(1)
    crops = windows[torch.arange(len(images), device=images.device), :, top, left]
    mirror = (draws[:, 2] % 2).bool().view(-1, 1, 1, 1)
    return torch.where(mirror, crops.flip(3), crops)


AUGMENTATIONS: dict[str, Augment] = {"none": none, "crop_flip": crop_flip}
