"""Random changes to training images, on whole batches at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PAD = 4  # He et al., CVPR 2016, arXiv 1512.03385, section 4.2: "4 pixels are padded on each side"
DEGREES = 15.0  # to either side: the CIFAR-100 recipe in the public code of MiCRO and ExDyna
AREA = (0.08, 1.0)  # share of the image: Szegedy et al., CVPR 2015, arXiv 1409.4842, section 6
ASPECT = (3 / 4, 4 / 3)  # width / height: the same source
TRIES = 10  # draws until a rectangle fits into the image, as in torchvision's RandomResizedCrop
DRAW_RANGE = 2**31  # random integers are in [0, DRAW_RANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """A random change, as a function of integers drawn beforehand.

    Attributes:
        apply: (batch, channels, height, width) images, which it does not modify, (batch, num_draws) int64 draws in
            [0, DRAW_RANGE) on the same device, and height and width of the result -> images.
        num_draws: random integers per image.
    """

    apply: Callable[[Tensor, Tensor, tuple[int, int]], Tensor]
    num_draws: int


def centre(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a view of the middle of (..., height, width) images, which are at least as large as size."""
    top, left = (images.shape[-2] - size[0]) // 2, (images.shape[-1] - size[1]) // 2
    return images[..., top : top + size[0], left : left + size[1]]


def none(images: Tensor, draws: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the middle of the images: all of them, unless they are larger than size."""
    return centre(images, size)


def crop_flip(images: Tensor, draws: Tensor, size: tuple[int, int]) -> Tensor:
    """Pad each image with zeros, crop it at a random place, and mirror it with probability 1/2.

    The augmentation of He et al., CVPR 2016, arXiv 1512.03385, section 4.2.

    Args:
        images: (batch, channels, height, width); of images larger than size only the middle is used. Not modified.
        draws: (batch, 3) random integers: row and column of the crop, and whether to mirror.
        size: height and width of the result.
    Returns:
        new images of the same type.
    """
    windows = F.pad(centre(images, size), (PAD, PAD, PAD, PAD)).unfold(2, size[0], 1).unfold(3, size[1], 1)
    top, left = (draws[:, :2] % (2 * PAD + 1)).unbind(1)
    crops = windows[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(_mirror(draws).view(-1, 1, 1, 1), crops.flip(3), crops)


def crop_flip_rotate(images: Tensor, draws: Tensor, size: tuple[int, int]) -> Tensor:
    """Do as `crop_flip`, then turn each image about its middle by at most DEGREES to either side.

    A pixel takes the value of the nearest one of the unturned image, or 0 where that lies outside.

    Args:
        images: as for `crop_flip`.
        draws: (batch, 4) random integers: those of `crop_flip`, and the angle.
        size: height and width of the result.
    Returns:
        new images of the same type.
    """
    crops = crop_flip(images, draws, size)
    angle = (2 * _unit(draws[:, 3]) - 1) * math.radians(DEGREES)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    height, width = size  # coordinates of grid_sample run from -1 to 1 along each side, whatever its length
    rows = [torch.stack([cos, -sin * height / width, zero], 1), torch.stack([sin * width / height, cos, zero], 1)]
    grid = F.affine_grid(torch.stack(rows, 1).float(), list(crops.shape), align_corners=False)
    return F.grid_sample(crops.float(), grid, mode="nearest", align_corners=False).to(crops.dtype)


def resized_crop(images: Tensor, draws: Tensor, size: tuple[int, int]) -> Tensor:
    """Stretch a random rectangle of each image to size, and mirror it with probability 1/2.

    The augmentation of Szegedy et al., CVPR 2015, arXiv 1409.4842, section 6: the rectangle has an AREA of the image
    and an ASPECT, uniform in logarithm. Differences from torchvision's RandomResizedCrop: bilinear without
    anti-aliasing; if none of TRIES rectangles fits, the largest square of the image.

    Args:
        images: (batch, channels, height, width). Not modified.
        draws: (batch, 3 + 2 * TRIES) random integers: row, column, whether to mirror; areas; aspects.
        size: height and width of the result.
    Returns:
        new float32 images in the units of the given ones.
    """
    top, left, height, width = _rectangles(draws, images.shape[2], images.shape[3])
    rows, columns = _places(top, height, size[0]), _places(left, width, size[1])
    columns = torch.where(_mirror(draws).view(-1, 1), columns.flip(1), columns)
    y = ((2 * rows + 1) / images.shape[2] - 1).view(-1, size[0], 1).expand(-1, -1, size[1])
    x = ((2 * columns + 1) / images.shape[3] - 1).view(-1, 1, size[1]).expand(-1, size[0], -1)
    grid = torch.stack([x, y], 3).float()
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def _rectangles(draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (batch,) int64 first row, first column, height and width of the first rectangle that fits."""
    area, aspect = _unit(draws[:, 3 : 3 + TRIES]), _unit(draws[:, 3 + TRIES :])
    area = (AREA[0] + area * (AREA[1] - AREA[0])) * (height * width)
    aspect = (math.log(ASPECT[0]) + aspect * math.log(ASPECT[1] / ASPECT[0])).exp()
    heights, widths = (area / aspect).sqrt().round().long(), (area * aspect).sqrt().round().long()
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    first = fits.int().argmax(1, keepdim=True)
    chosen, found = [side.gather(1, first).squeeze(1) for side in (heights, widths)], fits.any(1)
    tall, wide = (torch.where(found, side, min(height, width)) for side in chosen)
    return draws[:, 0] % (height - tall + 1), draws[:, 1] % (width - wide + 1), tall, wide


def _places(start: Tensor, length: Tensor, num: int) -> Tensor:
    """Return (batch, num) coordinates, in pixels, that resample the length pixels from start to num pixels."""
    steps = torch.arange(num, device=start.device, dtype=torch.float64) + 0.5
    inside = steps * length.view(-1, 1) / num - 0.5
    return start.view(-1, 1) + inside.clamp(min=0).minimum(length.view(-1, 1) - 1.0)


def _unit(draws: Tensor) -> Tensor:
    """Return draws as float64 in [0, 1)."""
    return draws.double() / DRAW_RANGE


def _mirror(draws: Tensor) -> Tensor:
    return (draws[:, 2] % 2).bool()


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(apply=none, num_draws=0),
    "crop_flip": Augmentation(apply=crop_flip, num_draws=3),
    "crop_flip_rotate": Augmentation(apply=crop_flip_rotate, num_draws=4),
    "resized_crop": Augmentation(apply=resized_crop, num_draws=3 + 2 * TRIES),
}
